// Starts the thread of an accelerator when it is first asked for, and ends those that there are.
#include "core/autograd/executor/device_threads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace distgrad {

ThreadPool* DeviceThreads::Of(c10::Device device) {
  absl::MutexLock lock(&mu_);
  if (const auto found = devices_.find(device); found != devices_.end()) {
    return found->second.get();
  }
  auto thread = std::make_unique<ThreadPool>(absl::StrCat("dg-", device.str()), 1, clock_);
  if (closed_) thread->Close();
  return devices_.emplace(device, std::move(thread)).first->second.get();
}

std::vector<ThreadPool*> DeviceThreads::All() const {
  std::vector<ThreadPool*> all;
  absl::MutexLock lock(&mu_);
  for (const auto& [device, thread] : devices_) all.push_back(thread.get());
  return all;
}

bool DeviceThreads::Join(Deadline deadline) {
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  bool joined = true;
  for (ThreadPool* thread : All()) joined = thread->Join(deadline) && joined;
  return joined;
}

bool DeviceThreads::OnThese() const {
  const std::vector<ThreadPool*> all = All();
  return std::any_of(all.begin(), all.end(), [](ThreadPool* t) { return t->OnThisPool(); });
}

size_t DeviceThreads::thread_count() const {
  size_t count = 0;
  for (ThreadPool* thread : All()) count += thread->thread_count();
  return count;
}

}  // namespace distgrad
