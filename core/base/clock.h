// Time and timers, behind an interface so that tests can turn the clock by hand.
#ifndef DISTGRAD_CORE_BASE_CLOCK_H_
#define DISTGRAD_CORE_BASE_CLOCK_H_

#include <cstdint>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"

namespace distgrad {

// Thread-safe.
class Clock {
 public:
  using TimerId = uint64_t;

  // Drops the timers that have not fired, and waits for one that is firing.
  virtual ~Clock() = default;

  // Returns the time by a count of its own, which never goes back. It begins close to the wall
  // clock, and goes on evenly when that is set.
  virtual absl::Time Now() = 0;

  // Returns a deadline by this count.
  absl::Time TimeOf(Deadline deadline) {
    return deadline.is_never() ? absl::InfiniteFuture() : Now() + deadline.Left();
  }

  // Calls `callback` once, at or after `when`, on the clock's own thread, with no lock held;
  // it must not block. Timers of the same time fire in the order in which they were set;
  // absl::InfiniteFuture() never fires. One whose callback throws std::bad_alloc fires again a
  // moment later, unless it is cancelled before: so what must not be done twice comes last.
  virtual TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) = 0;

  // Takes a timer back. False if it has fired, is firing, or is not known; then nothing is
  // waited for, and one that is firing fires again should its callback throw std::bad_alloc: it
  // needs a flag of its own to know that it is not wanted. The callback of a cancelled timer is
  // destroyed before this returns.
  virtual bool Cancel(TimerId timer) = 0;
};

// The machine's steady clock, with one thread that sleeps until the next timer.
// kResourceExhausted where the machine gives no thread.
absl::StatusOr<std::unique_ptr<Clock>> NewSystemClock();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_CLOCK_H_
