// The timers of a clock that have not fired, in the order in which they will.
#ifndef DISTGRAD_CORE_BASE_TIMER_QUEUE_H_
#define DISTGRAD_CORE_BASE_TIMER_QUEUE_H_

#include <cstdint>
#include <map>
#include <new>
#include <unordered_map>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace distgrad::internal {

// Needs a lock of its owner's around it; what it hands out is to be called and destroyed
// outside that lock.
class TimerQueue {
  using Timers = std::map<std::pair<absl::Time, uint64_t>, absl::AnyInvocable<void()>>;

 public:
  using Id = uint64_t;  // Clock::TimerId
  using Callback = absl::AnyInvocable<void()>;
  using Firing = Timers::node_type;

  // Where there is no memory the callback stays with the caller.
  Id Add(absl::Time when, Callback&& callback) {
    const Id id = ++last_id_;
    const auto added = when_.emplace(id, when).first;
    absl::Cleanup take_out = [&] { when_.erase(added); };
    timers_.emplace(std::make_pair(when, id), std::move(callback));
    std::move(take_out).Cancel();
    return id;
  }

  // Takes a timer out; null if there is no such timer, or it is firing. Whoever gets null counts on
  // the callback to do what it is for: so where that finds no memory it is called again all the
  // same.
  Callback Remove(Id id) {
    const auto found = when_.find(id);
    if (found == when_.end()) return nullptr;
    const auto timer = timers_.find({found->second, id});
    if (timer == timers_.end()) return nullptr;
    when_.erase(found);
    return std::move(timers_.extract(timer).mapped());
  }

  // The time of the first timer; InfiniteFuture when there is none.
  absl::Time Next() const {
    return timers_.empty() ? absl::InfiniteFuture() : timers_.begin()->first.first;
  }

  // Takes the first timer out; there must be one.
  Callback Pop() {
    Firing first = Fire();
    when_.erase(first.key().second);
    return std::move(first.mapped());
  }

  // The same in parts, for a timer that may have to fire again: Fire() under the lock, Call()
  // without it, and Fired() under it. That puts back one which there was no memory to call, and
  // needs none itself. What is left of the timer is destroyed outside the lock.
  Firing Fire() { return timers_.extract(timers_.begin()); }
  static bool Call(Firing& timer) {
    try {
      timer.mapped()();
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  void Fired(Firing& timer, bool called, absl::Time now) {
    const auto found = when_.find(timer.key().second);
    if (called) {
      when_.erase(found);
    } else {
      found->second = timer.key().first = now + kAgain;
      timers_.insert(std::move(timer));
    }
  }

 private:
  static constexpr absl::Duration kAgain = absl::Milliseconds(10);

  Id last_id_ = 0;
  Timers timers_;                            // the id orders timers of the same time
  std::unordered_map<Id, absl::Time> when_;  // also of those that are firing
};

}  // namespace distgrad::internal

#endif  // DISTGRAD_CORE_BASE_TIMER_QUEUE_H_
