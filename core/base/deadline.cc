// Converts between the wall clock and the monotonic one, and sleeps by the latter.
#include "core/base/deadline.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace distgrad {
namespace {

using Clock = Deadline::Clock;

// Beyond the end of any process, and within the range of the clock.
constexpr absl::Duration kFar = absl::Hours(24 * 365 * 100);

Clock::time_point FromNow(absl::Duration left) {
  if (left >= kFar) return Clock::time_point::max();
  if (left <= -kFar) return Clock::time_point::min();
  return Clock::now() + absl::ToChronoNanoseconds(left);
}

}  // namespace

Deadline::Deadline(absl::Time wall)
    : at_(wall == absl::InfiniteFuture() ? Clock::time_point::max()
          : wall == absl::InfinitePast() ? Clock::time_point::min()
                                         : FromNow(wall - absl::Now())) {}

Deadline Deadline::After(absl::Duration timeout) { return Deadline(FromNow(timeout)); }

bool Deadline::Passed() const { return !is_never() && Clock::now() >= at_; }

absl::Duration Deadline::Left() const {
  if (is_never()) return absl::InfiniteDuration();
  const Clock::time_point now = Clock::now();
  return now >= at_ ? absl::ZeroDuration() : absl::FromChrono(at_ - now);
}

bool Sleeper::Sleep(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mu_);
  const auto woken = [this] { return woken_; };
  if (!deadline.is_never()) return wake_.wait_until(lock, deadline.at(), woken);
  wake_.wait(lock, woken);
  return true;
}

void Sleeper::Wake() {
  std::lock_guard<std::mutex> lock(mu_);
  woken_ = true;
  wake_.notify_one();
}

}  // namespace distgrad
