// The pairs of a device of this worker and one of another: a tensor that is on the one here arrives
// on the other there, and its gradient comes back the same way.
#ifndef DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_
#define DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_

#include <c10/core/Device.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

// Pairs of a local device and a remote one. The CPU is not among them: it always goes with the CPU.
using DevicePairs = std::vector<std::pair<c10::Device, c10::Device>>;

// Immutable once it is shared.
class DeviceMap {
 public:
  // Maps the CPU alone.
  DeviceMap() = default;
  // Maps every device to the one of the same name: for a worker with itself.
  static DeviceMap Identity();
  // Returns kInvalidArgument unless `pairs` is one to one, each device has its number, and none is
  // the CPU.
  static absl::StatusOr<DeviceMap> Of(DevicePairs pairs);

  // Returns the remote device of a local one; kFailedPrecondition, which names it, if there is
  // none.
  absl::StatusOr<c10::Device> Remote(c10::Device local) const;

  // Returns this map merged with the other end's for us, in its terms. kInvalidArgument where the
  // two do not agree.
  absl::StatusOr<DeviceMap> With(const DeviceMap& theirs) const;

  const DevicePairs& pairs() const { return pairs_; }

  // Whether memory of GPUs goes to GPUs as it is. If not, by way of the CPU, like all others.
  bool carries_gpus() const { return carries_gpus_; }
  void set_carries_gpus(bool carries) { carries_gpus_ = carries; }

 private:
  bool identity_ = false;
  bool carries_gpus_ = false;
  DevicePairs pairs_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_
