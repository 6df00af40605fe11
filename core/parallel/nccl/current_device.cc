// Guards that let nothing out, and a timer that is waited for.
#include "core/parallel/nccl/current_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <exception>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"
#include "core/base/log.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// What CUDA refuses goes to the log.
void OrLog(c10::Device device, absl::FunctionRef<void()> make_current) {
  try {
    make_current();
  } catch (...) {
    DG_LOG(WARNING) << "NCCL of " << device.str() << ": "
                    << StatusFromException(std::current_exception());
  }
}

}  // namespace

OnDevice::OnDevice(c10::Device device) {
  OrLog(device, [&] { guard_.emplace(device); });
}

void MakeCurrentDevice(c10::Device device, Clock* clock) {
  absl::Notification is_current;
  clock->At(clock->Now(), [device, &is_current] {
    // Not uncheckedSetDevice(): where the device has no context yet, c10 would only note it, and
    // the next guard, which is that of the abort, would call cudaSetDevice().
    OrLog(device, [&] { c10::impl::getDeviceGuardImpl(device.type())->setDevice(device); });
    is_current.Notify();
  });
  is_current.WaitForNotification();
}

}  // namespace distgrad
