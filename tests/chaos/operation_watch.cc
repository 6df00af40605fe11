// Adds up short waits.
#include "tests/chaos/operation_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace distgrad {

OperationWatch::OperationWatch(absl::Duration bound,
                               std::function<void(const std::string&)> too_long)
    : bound_(bound), too_long_(std::move(too_long)), thread_([this] { Run(); }) {}

OperationWatch::~OperationWatch() {
  stop_.Notify();
  thread_.join();
}

void OperationWatch::Begin(std::string operation) {
  absl::MutexLock lock(&mu_);
  operation_ = std::move(operation);
  took_ = absl::ZeroDuration();
}

absl::Duration OperationWatch::End() {
  absl::MutexLock lock(&mu_);
  operation_.clear();
  return took_;
}

void OperationWatch::Run() {
  auto last = std::chrono::steady_clock::now();
  while (!stop_.WaitForNotificationWithTimeout(kTick)) {
    const auto now = std::chrono::steady_clock::now();
    const absl::Duration ran = std::min(absl::FromChrono(now - last), kLongestTick);
    last = now;
    std::string late;
    {
      absl::MutexLock lock(&mu_);
      took_ += ran;
      if (took_ > bound_) late.swap(operation_);
    }
    if (!late.empty()) too_long_(late);
  }
}

}  // namespace distgrad
