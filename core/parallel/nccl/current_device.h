// Makes a GPU the current one of a thread for what NCCL and events of CUDA do as they end: they
// make the device current again that was it before, and a process that has no context on that one
// would have it from then on.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_CURRENT_DEVICE_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_CURRENT_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "core/base/clock.h"

namespace distgrad {

// As long as it lives. An error of CUDA goes to the log, and hinders no end.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device);

 private:
  std::optional<c10::DeviceGuard> guard_;
};

// On the clock's own thread, for good: then an abort by a deadline calls nothing of CUDA before
// NCCL has ended that device's kernels. Waits for it, since a program may exit when this has
// returned, and CUDA is unloaded then. A clock that is turned by hand has no thread of its own.
void MakeCurrentDevice(c10::Device device, Clock* clock);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_CURRENT_DEVICE_H_
