// Waits for what a mutex guards, until a deadline.
//
//   bool Queue::AwaitEmpty(Deadline deadline) {
//     absl::MutexLock lock(&mu_);
//     return sleepers_.Await(&mu_, absl::Condition(this, &Queue::Empty), deadline);
//   }
//   ... and where it may have become empty, under mu_: sleepers_.WakeAll();
#ifndef DISTGRAD_CORE_BASE_SLEEPERS_H_
#define DISTGRAD_CORE_BASE_SLEEPERS_H_

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/deadline.h"

namespace distgrad {

// The threads that wait. absl::Mutex can wait with a limit only by the wall clock. Needs a lock of
// its owner's around it.
class Sleepers {
 public:
  // Waits until the condition holds, and lets go of `mu` meanwhile. False if it does not hold once
  // the deadline has passed. The condition is looked at under `mu`, on this thread alone.
  bool Await(absl::Mutex* mu, const absl::Condition& condition, Deadline deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // Has all of them look at their conditions again.
  void WakeAll();

 private:
  std::vector<Sleeper*> sleepers_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_SLEEPERS_H_
