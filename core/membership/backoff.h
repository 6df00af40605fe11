// Asks again and again, ever more rarely.
#ifndef DISTGRAD_CORE_MEMBERSHIP_BACKOFF_H_
#define DISTGRAD_CORE_MEMBERSHIP_BACKOFF_H_

#include <algorithm>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"

namespace distgrad {

class Backoff {
 public:
  explicit Backoff(Deadline deadline) : deadline_(deadline) {}

  // Sleeps a little, not past the deadline; false if it has passed already.
  bool Sleep() {
    const absl::Duration left = deadline_.Left();
    if (left == absl::ZeroDuration()) return false;
    absl::SleepFor(std::min(pause_, left));
    pause_ = std::min(pause_ * 1.5, absl::Milliseconds(100));
    return true;
  }

 private:
  const Deadline deadline_;
  absl::Duration pause_ = absl::Milliseconds(1);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_BACKOFF_H_
