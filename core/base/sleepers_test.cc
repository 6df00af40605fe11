// Waits for a condition: how they are woken, and when they end in vain.
#include "core/base/sleepers.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/wall_clock.h"

namespace distgrad {
namespace {

class Flag {
 public:
  void Set() {
    absl::MutexLock lock(&mu_);
    set_ = true;
    sleepers_.WakeAll();
  }
  void Wake() {
    absl::MutexLock lock(&mu_);
    sleepers_.WakeAll();
  }
  bool Await(Deadline deadline) {
    absl::MutexLock lock(&mu_);
    return sleepers_.Await(&mu_, absl::Condition(&set_), deadline);
  }

 private:
  absl::Mutex mu_;
  Sleepers sleepers_ ABSL_GUARDED_BY(mu_);
  bool set_ ABSL_GUARDED_BY(mu_) = false;
};

TEST(SleepersTest, AConditionThatHoldsIsNotWaitedFor) {
  Flag flag;
  flag.Set();
  EXPECT_TRUE(flag.Await(absl::InfinitePast()));
  EXPECT_TRUE(flag.Await(Deadline::Never()));
}

TEST(SleepersTest, ADeadlineEndsTheWait) {
  Flag flag;
  EXPECT_FALSE(flag.Await(absl::InfinitePast()));
  EXPECT_FALSE(flag.Await(Deadline::After(absl::Milliseconds(1))));
}

// Destructors wait, too.
TEST(SleepersTest, WithoutMemoryTheWaitEndsAllTheSame) {
  Flag flag;
  FailAllocation(0, /*count=*/3);
  EXPECT_FALSE(flag.Await(Deadline::After(absl::Milliseconds(100))));
  EXPECT_TRUE(FailAllocation(-1));
}

TEST(SleepersTest, AllAreWoken) {
  Flag flag;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_TRUE(flag.Await(i % 2 == 0 ? Deadline::Never() : Deadline::After(absl::Hours(1))));
    });
  }
  for (int i = 0; i < 100; ++i) flag.Wake();  // for nothing: they go on waiting
  flag.Set();
  for (std::thread& thread : threads) thread.join();
}

// By the wall clock, which is an hour behind the one that the deadline was made by, the wait would
// last that hour.
TEST(SleepersTest, TheWallClockDoesNotMoveTheEnd) {
  Flag flag;
  SetWallClockAhead(absl::Hours(1));
  EXPECT_FALSE(flag.Await(absl::Now() + absl::Milliseconds(1)));
  SetWallClockAhead(absl::ZeroDuration());
}

}  // namespace
}  // namespace distgrad
