// The collectives between the devices of one process: broadcasts tensors to a list of devices, and
// reduces (adds) them from there. (Between processes: process_group/.) A list of tensors is
// handled at a time, so that an implementation can send many small ones as one.
//
// The interface knows no autograd: nothing is recorded. What is passed in must be ready on the
// calling thread's current streams, each tensor on its device's; results are ready on the
// current streams of the devices that they lie on, and no other stream waits for them. Memory of
// what is passed in may be freed at once.
#ifndef DISTGRAD_CORE_PARALLEL_DEVICE_COLLECTIVES_H_
#define DISTGRAD_CORE_PARALLEL_DEVICE_COLLECTIVES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace distgrad {

using TensorVector = std::vector<at::Tensor>;

struct DeviceCollectivesOptions {
  // What is packed together, at most.
  size_t bucket_bytes = size_t{25} << 20;
  // How long a call, or what it left running on the devices, may take until all fail with
  // kDeadlineExceeded. A call that waits for its turn for as long fails, too, and no other.
  absl::Duration timeout = absl::Minutes(10);
};

// Thread-safe; calls take turns.
class DeviceCollectives {
 public:
  virtual ~DeviceCollectives() = default;

  // Fixed, at least one; the same device may stand there several times.
  virtual const std::vector<c10::Device>& devices() const = 0;

  // The sums, on `destination`: of the k-th tensors of all lists, in the order of the devices.
  // lists[i] lies on devices()[i]; all are of one length, and the defined k-th tensors of one
  // shape and dtype. An undefined tensor counts as zeros; where all k-th are undefined, so is the
  // result. Sparse tensors are added as torch does. A sum of one may be that tensor itself.
  // kInvalidArgument says which tensor of which list is not as it should be.
  virtual absl::StatusOr<TensorVector> Reduce(absl::Span<const TensorVector> lists,
                                              c10::Device destination) = 0;

  // The tensors, which lie on one device, for each device of the list; undefined ones stay so.
  // For a device that they are on already, they are the tensors themselves; else new memory.
  virtual absl::StatusOr<std::vector<TensorVector>> Broadcast(const TensorVector& tensors) = 0;

  // Has calls in flight, and all later ones, fail with `why`, which is not OK. The first wins.
  virtual void Abort(const absl::Status& why) = 0;
};

// What an implementation requires of the arguments of Reduce and of Broadcast.
absl::Status CheckReduce(absl::Span<const c10::Device> devices,
                         absl::Span<const TensorVector> lists);
absl::Status CheckBroadcast(const TensorVector& tensors);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_DEVICE_COLLECTIVES_H_
