// A clock for tests: time stands still until the test moves it.
//
//   FakeClock clock;
//   clock.At(clock.Now() + absl::Seconds(5), [&] { fired = true; });
//   clock.Advance(absl::Seconds(5));  // fired is true now
#ifndef DISTGRAD_CORE_BASE_FAKE_CLOCK_H_
#define DISTGRAD_CORE_BASE_FAKE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/timer_queue.h"

namespace distgrad {

// Thread-safe; but one Advance or AdvanceTo at a time.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::FromUnixSeconds(1'000'000'000)) : now_(start) {}

  absl::Time Now() override;
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override;
  bool Cancel(TimerId timer) override;

  // Moves time on and runs the timers that become due, on the calling thread, in the order of
  // their times; each sees its own time as Now(). Those that they set run too if they are due.
  // Going back is not possible: an earlier time only runs what is due already.
  void Advance(absl::Duration by) { AdvanceTo(Now() + by); }
  void AdvanceTo(absl::Time to);

  // When the next timer fires; absl::InfiniteFuture() if there is none.
  absl::Time NextTimer();

 private:
  absl::Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_);
  internal::TimerQueue timers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_FAKE_CLOCK_H_
