// Lets each waiting thread sleep on a Sleeper of its own, by the monotonic clock.
#include "core/base/sleepers.h"

#include <algorithm>
#include <new>

#include "absl/time/clock.h"

namespace distgrad {

bool Sleepers::Await(absl::Mutex* mu, const absl::Condition& condition, Deadline deadline) {
  while (!condition.Eval()) {
    if (deadline.Passed()) return false;
    Sleeper sleeper;
    try {
      sleepers_.push_back(&sleeper);
    } catch (const std::bad_alloc&) {  // nobody can wake it, so it looks now and then
      mu->Unlock();
      absl::SleepFor(absl::Milliseconds(1));
      mu->Lock();
      continue;
    }
    mu->Unlock();
    sleeper.Sleep(deadline);
    mu->Lock();
    sleepers_.erase(std::find(sleepers_.begin(), sleepers_.end(), &sleeper));
  }
  return true;
}

void Sleepers::WakeAll() {
  for (Sleeper* sleeper : sleepers_) sleeper->Wake();
}

}  // namespace distgrad
