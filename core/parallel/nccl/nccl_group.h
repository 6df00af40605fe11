// The part of NCCL that the collectives need: a communicator for each of several devices, all in
// this process.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_NCCL_GROUP_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_NCCL_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace distgrad {

// Nothing here waits: what is called only begins, and Ready() says when it has gone to the streams.
// Not thread-safe: one call at a time. Errors name the device.
class NcclGroup {
 public:
  // One device's part in a collective: tensors with no gaps in their memory, of which the elements
  // as they lie there count, and no strides. The stream is of that device.
  struct Part {
    at::Tensor send;
    at::Tensor receive;
    c10::Stream stream;
  };

  // Ends what still runs.
  virtual ~NcclGroup() = default;

  // Returns false as long as the communicators are being set up, or a collective has not gone to
  // the streams completely. An error if a communicator has failed, also later on.
  virtual absl::StatusOr<bool> Ready() = 0;

  // Puts the sum of the first `count` elements of all `send`, of a type that NcclAdds, in `receive`
  // of parts[root], which may be its `send`; the other `receive` are not used. Only when Ready().
  // One part for each device, in their order.
  virtual absl::Status Reduce(absl::Span<const Part> parts, size_t count, size_t root) = 0;

  // Puts the first `count` elements, of any type, of `send` of parts[root] into all other
  // `receive`.
  virtual absl::Status Broadcast(absl::Span<const Part> parts, size_t count, size_t root) = 0;

  // Whatever runs on the devices ends, its results worth nothing. Nothing may be called after it.
  virtual void Abort() = 0;
};

// What NCCL and its devices have beyond c10's interface, so that a test can stand in for both.
struct NcclPlatform {
  // Begins to set up communicators.
  std::function<absl::StatusOr<std::unique_ptr<NcclGroup>>(const std::vector<c10::Device>&)> start;
  // Whether what is launched on the stream becomes a part of a graph, and does not run.
  std::function<bool(c10::Stream stream)> is_capturing;
  // Whether the event has come. It does no harm to what other threads capture, and makes no context
  // on the thread's current device. It may wait; throws what c10 throws.
  std::function<bool(const c10::Event& event)> query;
};

// Whether NCCL adds elements of this type.
inline bool NcclAdds(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return true;
    default:
      return false;
  }
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_NCCL_GROUP_H_
