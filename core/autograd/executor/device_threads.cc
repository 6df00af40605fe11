// Starts the thread of an accelerator when it is first asked for.
#include "core/autograd/executor/device_threads.h"

#include "absl/strings/str_cat.h"

namespace distgrad {

ThreadPool* DeviceThreads::Of(c10::Device device) {
  absl::MutexLock lock(&mu_);
  std::unique_ptr<ThreadPool>& thread = devices_[device];
  if (thread == nullptr) {
    thread = std::make_unique<ThreadPool>(absl::StrCat("dg-", device.str()), 1);
  }
  return thread.get();
}

}  // namespace distgrad
