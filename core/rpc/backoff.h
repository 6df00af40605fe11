// Asks again and again, ever more rarely.
#ifndef DISTGRAD_CORE_RPC_BACKOFF_H_
#define DISTGRAD_CORE_RPC_BACKOFF_H_

#include <algorithm>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace distgrad {

class Backoff {
 public:
  explicit Backoff(absl::Time deadline) : deadline_(deadline) {}

  // Sleeps a little, not past the deadline; false if it has passed already.
  bool Sleep() {
    const absl::Time now = absl::Now();
    if (now >= deadline_) return false;
    absl::SleepFor(std::min(pause_, deadline_ - now));
    pause_ = std::min(pause_ * 1.5, absl::Milliseconds(100));
    return true;
  }

 private:
  const absl::Time deadline_;
  absl::Duration pause_ = absl::Milliseconds(1);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_BACKOFF_H_
