// The timers of a clock that have not fired, in the order in which they will.
#ifndef DISTGRAD_CORE_BASE_TIMER_QUEUE_H_
#define DISTGRAD_CORE_BASE_TIMER_QUEUE_H_

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace distgrad::internal {

// Needs a lock of its owner's around it; what it hands out is to be called and destroyed
// outside that lock.
class TimerQueue {
 public:
  using Id = uint64_t;  // Clock::TimerId
  using Callback = absl::AnyInvocable<void()>;

  // Where there is no memory the callback stays with the caller.
  Id Add(absl::Time when, Callback&& callback) {
    const Id id = ++last_id_;
    const auto added = when_.emplace(id, when).first;
    absl::Cleanup take_out = [&] { when_.erase(added); };
    timers_.emplace(std::make_pair(when, id), std::move(callback));
    std::move(take_out).Cancel();
    return id;
  }

  // Takes a timer out; null if there is no such timer.
  Callback Remove(Id id) {
    const auto found = when_.find(id);
    if (found == when_.end()) return nullptr;
    return Extract(timers_.find({found->second, id}));
  }

  // The time of the first timer; InfiniteFuture when there is none.
  absl::Time Next() const {
    return timers_.empty() ? absl::InfiniteFuture() : timers_.begin()->first.first;
  }

  // The first timer; there must be one.
  Callback Pop() { return Extract(timers_.begin()); }

 private:
  using Timers = std::map<std::pair<absl::Time, Id>, Callback>;

  Callback Extract(Timers::iterator timer) {
    Callback callback = std::move(timer->second);
    when_.erase(timer->first.second);
    timers_.erase(timer);
    return callback;
  }

  Id last_id_ = 0;
  Timers timers_;  // the id orders timers of the same time
  std::unordered_map<Id, absl::Time> when_;
};

}  // namespace distgrad::internal

#endif  // DISTGRAD_CORE_BASE_TIMER_QUEUE_H_
