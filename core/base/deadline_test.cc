// Deadlines near the ends of the clocks' range, and while the wall clock is set.
#include "core/base/deadline.h"

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "core/base/future.h"
#include "tests/testing/wall_clock.h"

namespace distgrad {
namespace {

class DeadlineTest : public ::testing::Test {
 protected:
  ~DeadlineTest() override { SetWallClockAhead(absl::ZeroDuration()); }
};

TEST_F(DeadlineTest, WhatIsLeftOfIt) {
  const Deadline soon = absl::Now() + absl::Minutes(5);
  EXPECT_FALSE(soon.Passed());
  EXPECT_LE(soon.Left(), absl::Minutes(5));
  EXPECT_GT(soon.Left(), absl::Minutes(1));
  const Deadline past = absl::Now() - absl::Minutes(5);
  EXPECT_TRUE(past.Passed());
  EXPECT_EQ(past.Left(), absl::ZeroDuration());
  EXPECT_TRUE(past < soon);
  EXPECT_TRUE(soon < Deadline::After(absl::Minutes(6)));
}

TEST_F(DeadlineTest, TimesOutOfTheClocksRange) {
  for (const Deadline never : {Deadline(absl::InfiniteFuture()), Deadline::Never(),
                               Deadline::After(absl::InfiniteDuration()),
                               Deadline(absl::Now() + absl::Hours(24) * 365 * 1000)}) {
    EXPECT_TRUE(never.is_never());
    EXPECT_FALSE(never.Passed());
    EXPECT_EQ(never.Left(), absl::InfiniteDuration());
  }
  for (const Deadline past :
       {Deadline(absl::InfinitePast()), Deadline::After(-absl::InfiniteDuration())}) {
    EXPECT_TRUE(past == absl::InfinitePast());
    EXPECT_TRUE(past.Passed());
    EXPECT_EQ(past.Left(), absl::ZeroDuration());
  }
}

TEST_F(DeadlineTest, TheWallClockMovesNone) {
  const Deadline soon = absl::Now() + absl::Minutes(5);
  SetWallClockAhead(absl::Hours(1));
  EXPECT_FALSE(soon.Passed());
  SetWallClockAhead(-absl::Hours(1));
  EXPECT_LE(soon.Left(), absl::Minutes(5));
}

TEST_F(DeadlineTest, ASleeperIsWokenOrNot) {
  Sleeper never_woken, woken;
  EXPECT_FALSE(never_woken.Sleep(Deadline::After(absl::Milliseconds(1))));
  EXPECT_FALSE(never_woken.Sleep(absl::InfinitePast()));
  std::thread wakes([&] { woken.Wake(); });
  EXPECT_TRUE(woken.Sleep(Deadline::Never()));
  EXPECT_TRUE(woken.Sleep(absl::InfinitePast())) << "it stays woken";
  wakes.join();
}

// The kernel's clock is behind the one that the deadline was made by, as if it had been set back
// when the wait began. A wait by the wall clock would last an hour.
TEST_F(DeadlineTest, AWaitForAFutureLastsNoLongerThoughTheClockIsSetBack) {
  SetWallClockAhead(absl::Hours(1));
  Promise<int> promise;
  const Future<int> future = promise.future();
  EXPECT_FALSE(future.WaitUntil(absl::Now() + absl::Milliseconds(20)));
  promise.Set(7);
  EXPECT_TRUE(future.WaitUntil(absl::InfinitePast()));
}

}  // namespace
}  // namespace distgrad
