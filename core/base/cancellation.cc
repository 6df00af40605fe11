// Calls whoever has asked to be told, once, outside the lock.
#include "core/base/cancellation.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "core/base/blocking.h"
#include "core/base/exception.h"

namespace distgrad {
namespace {

constexpr absl::string_view kCallback = "the callback of a cancellation";

}  // namespace

absl::Status Cancellation::why() const {
  absl::MutexLock lock(&mu_);
  return why_;
}

void Cancellation::Cancel(absl::Status why) {
  {
    absl::MutexLock lock(&mu_);
    if (!why_.ok()) return;
    why_ = std::move(why);
    cancelled_.store(true, std::memory_order_release);
    thread_ = std::this_thread::get_id();
    // From now on none comes. So the first is the last, and is taken without moving the others.
    std::reverse(watches_.begin(), watches_.end());
  }
  // One at a time, so that one that is forgotten meanwhile is not called.
  for (;;) {
    Callback callback;
    {
      absl::MutexLock lock(&mu_);
      called_ = 0;
      if (watches_.empty()) return;
      called_ = watches_.back().first;
      callback = std::move(watches_.back().second);
      watches_.pop_back();
    }
    CallAndLog(kCallback, callback);
  }
}

uint64_t Cancellation::OnCancel(Callback callback) {
  {
    absl::MutexLock lock(&mu_);
    if (why_.ok()) {
      watches_.emplace_back(++last_, std::move(callback));
      return last_;
    }
  }
  CallAndLog(kCallback, callback);
  return 0;
}

void Cancellation::ForgetWithoutWaiting(uint64_t watch) {
  Callback callback;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(watches_.begin(), watches_.end(),
                                  [&](const auto& entry) { return entry.first == watch; });
  if (found == watches_.end()) return;
  callback = std::move(found->second);
  watches_.erase(found);
}

void Cancellation::Forget(uint64_t watch) {
  ForgetWithoutWaiting(watch);
  const BlockingScope blocking;
  absl::MutexLock lock(&mu_);
  if (thread_ == std::this_thread::get_id()) return;
  const auto is_over = [&] {
    mu_.AssertReaderHeld();
    return called_ != watch;
  };
  if (watch != 0) mu_.Await(absl::Condition(&is_over));
}

}  // namespace distgrad
