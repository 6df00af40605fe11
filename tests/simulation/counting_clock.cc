// Has each timer share the ownership of an object with its clock, until it has fired or is taken
// back.
#include "tests/simulation/counting_clock.h"

#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace distgrad {

// The clock of production.
absl::StatusOr<std::unique_ptr<Clock>> NewRealClock() __asm__(
    "__real__ZN8distgrad14NewSystemClockEv");
// What the linker has others call in its place.
absl::StatusOr<std::unique_ptr<Clock>> NewCountingClock() __asm__(
    "__wrap__ZN8distgrad14NewSystemClockEv");

namespace simulation {
namespace {

thread_local std::weak_ptr<const void> newest;

// Thread-safe.
class CountingClock final : public Clock {
 public:
  explicit CountingClock(std::unique_ptr<Clock> clock) : clock_(std::move(clock)) {
    newest = counted_;
  }

  absl::Time Now() override { return clock_->Now(); }
  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    return clock_->At(
        when, [counted = counted_, callback = std::move(callback)]() mutable { callback(); });
  }
  bool Cancel(TimerId timer) override { return clock_->Cancel(timer); }

 private:
  const std::shared_ptr<const void> counted_ = std::make_shared<char>();
  const std::unique_ptr<Clock> clock_;
};

}  // namespace

std::weak_ptr<const void> TimersOfNewestClock() { return newest; }

}  // namespace simulation

absl::StatusOr<std::unique_ptr<Clock>> NewCountingClock() {
  DG_ASSIGN_OR_RETURN(std::unique_ptr<Clock> clock, NewRealClock());
  return std::make_unique<simulation::CountingClock>(std::move(clock));
}

}  // namespace distgrad
