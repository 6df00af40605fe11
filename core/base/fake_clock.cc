// Fires timers when the test moves the time past them.
#include "core/base/fake_clock.h"

#include <algorithm>
#include <utility>

namespace distgrad {

absl::Time FakeClock::Now() {
  absl::MutexLock lock(&mu_);
  return now_;
}

Clock::TimerId FakeClock::At(absl::Time when, absl::AnyInvocable<void()> callback) {
  absl::MutexLock lock(&mu_);
  return timers_.Add(when, std::move(callback));
}

bool FakeClock::Cancel(TimerId timer) {
  internal::TimerQueue::Callback callback;  // destroyed after the lock is given back
  absl::MutexLock lock(&mu_);
  callback = timers_.Remove(timer);
  return callback != nullptr;
}

void FakeClock::AdvanceTo(absl::Time to) {
  while (true) {
    internal::TimerQueue::Firing timer;
    {
      absl::MutexLock lock(&mu_);
      const absl::Time next = timers_.Next();
      if (next > to || next == absl::InfiniteFuture()) {
        now_ = std::max(now_, to);
        return;
      }
      now_ = std::max(now_, next);
      timer = timers_.Fire();
    }
    const bool called = internal::TimerQueue::Call(timer);
    absl::MutexLock lock(&mu_);
    timers_.Fired(timer, called, now_);
  }
}

absl::Time FakeClock::NextTimer() {
  absl::MutexLock lock(&mu_);
  return timers_.Next();
}

}  // namespace distgrad
