// Starts the thread of an accelerator when it is first asked for, and ends those that there are.
#include "core/autograd/executor/device_threads.h"

#include "absl/strings/str_cat.h"

namespace distgrad {

ThreadPool* DeviceThreads::Of(c10::Device device) {
  absl::MutexLock lock(&mu_);
  std::unique_ptr<ThreadPool>& thread = devices_[device];
  if (thread == nullptr) {
    thread = std::make_unique<ThreadPool>(absl::StrCat("dg-", device.str()), 1);
    if (closed_) thread->Close();
  }
  return thread.get();
}

void DeviceThreads::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
  for (const auto& [device, thread] : devices_) thread->Close();
}

size_t DeviceThreads::thread_count() const {
  absl::MutexLock lock(&mu_);
  size_t count = 0;
  for (const auto& [device, thread] : devices_) count += thread->thread_count();
  return count;
}

}  // namespace distgrad
