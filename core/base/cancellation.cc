// Calls whoever has asked to be told, once, outside the lock.
#include "core/base/cancellation.h"

#include <algorithm>

#include "absl/strings/string_view.h"
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
  std::vector<std::pair<uint64_t, Callback>> watches;
  {
    absl::MutexLock lock(&mu_);
    if (!why_.ok()) return;
    why_ = std::move(why);
    cancelled_.store(true, std::memory_order_release);
    watches.swap(watches_);
  }
  for (auto& [watch, callback] : watches) CallAndLog(kCallback, callback);
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

void Cancellation::Forget(uint64_t watch) {
  Callback callback;  // ends outside the lock
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(watches_.begin(), watches_.end(),
                                  [&](const auto& entry) { return entry.first == watch; });
  if (found == watches_.end()) return;
  callback = std::move(found->second);
  watches_.erase(found);
}

}  // namespace distgrad
