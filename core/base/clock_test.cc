// The order, the cancelling and the end of timers, of the fake clock and of the real one.
#include "core/base/clock.h"

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/fake_clock.h"
#include "core/base/timer_queue.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

TEST(FakeClockTest, RunsDueTimersInTheOrderOfTime) {
  FakeClock clock;
  const absl::Time start = clock.Now();
  std::vector<int> fired;
  const auto at = [&](int seconds) {
    clock.At(start + absl::Seconds(seconds), [&fired, &clock, start, seconds] {
      EXPECT_EQ(clock.Now(), start + absl::Seconds(seconds));
      fired.push_back(seconds);
    });
  };
  for (int seconds : {30, 10, 20, 40}) at(seconds);
  EXPECT_EQ(clock.NextTimer(), start + absl::Seconds(10));
  clock.Advance(absl::Seconds(9));
  EXPECT_TRUE(fired.empty());
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(fired, (std::vector<int>{10}));
  clock.AdvanceTo(start + absl::Seconds(35));
  EXPECT_EQ(fired, (std::vector<int>{10, 20, 30}));
  EXPECT_EQ(clock.Now(), start + absl::Seconds(35));
  clock.AdvanceTo(start);  // does not go back
  EXPECT_EQ(clock.Now(), start + absl::Seconds(35));
}

TEST(FakeClockTest, TimersOfTheSameTimeKeepTheirOrder) {
  FakeClock clock;
  std::vector<int> fired;
  for (int i = 0; i < 10; ++i) {
    clock.At(clock.Now() + absl::Seconds(1), [&fired, i] { fired.push_back(i); });
  }
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(fired, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

// Its end may call the clock, and so comes without the clock's lock.
TEST(TimerQueueTest, ACallbackForWhichThereIsNoMemoryStaysWithItsMaker) {
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    internal::TimerQueue timers;
    std::vector<internal::TimerQueue::Callback> callbacks(1);
    callbacks[0] = [] {};
    FailAllocation(nth);
    try {
      timers.Add(absl::UnixEpoch(), std::move(callbacks[0]));
    } catch (const std::bad_alloc&) {
      EXPECT_TRUE(callbacks[0] != nullptr);
      EXPECT_EQ(timers.Next(), absl::InfiniteFuture());
    }
    failed = FailAllocation(-1);
    const auto id = timers.Add(absl::UnixEpoch() + absl::Seconds(1), [] {});
    EXPECT_TRUE(timers.Remove(id) != nullptr);
  }
}

TEST(FakeClockTest, APastTimerWaitsForTheNextAdvance) {
  FakeClock clock;
  const absl::Time now = clock.Now();
  bool fired = false;
  clock.At(absl::InfinitePast(), [&] { fired = true; });
  EXPECT_FALSE(fired);
  clock.Advance(absl::ZeroDuration());
  EXPECT_TRUE(fired);
  EXPECT_EQ(clock.Now(), now);
}

TEST(FakeClockTest, CancelWithinACallback) {
  FakeClock clock;
  Clock::TimerId first = 0, second = 0;
  bool fired = false;
  first = clock.At(clock.Now() + absl::Seconds(1), [&] {
    EXPECT_FALSE(clock.Cancel(first));  // it is firing
    EXPECT_TRUE(clock.Cancel(second));
    EXPECT_FALSE(clock.Cancel(second));
  });
  second = clock.At(clock.Now() + absl::Seconds(1), [&] { fired = true; });
  clock.Advance(absl::Seconds(5));
  EXPECT_FALSE(fired);
}

TEST(FakeClockTest, TimersSetInACallbackRunIfDue) {
  FakeClock clock;
  const absl::Time start = clock.Now();
  std::vector<absl::Time> fired;
  clock.At(start + absl::Seconds(1), [&] {
    clock.At(clock.Now() + absl::Seconds(1), [&] { fired.push_back(clock.Now()); });
    clock.At(clock.Now() + absl::Seconds(9), [&] { fired.push_back(clock.Now()); });
  });
  clock.Advance(absl::Seconds(5));
  EXPECT_EQ(fired, (std::vector<absl::Time>{start + absl::Seconds(2)}));
}

// Its thread has nobody to tell, and what it was to do is to be done.
TEST(FakeClockTest, ATimerWithoutMemoryFiresAgain) {
  FakeClock clock;
  int calls = 0;
  clock.At(clock.Now(), [&] {
    if (++calls < 3) throw std::bad_alloc();
  });
  clock.Advance(absl::ZeroDuration());
  EXPECT_EQ(calls, 1);
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
}

TEST(FakeClockTest, ATimerWithoutMemoryCanBeCancelled) {
  FakeClock clock;
  int calls = 0;
  const Clock::TimerId timer = clock.At(clock.Now(), [&] {
    ++calls;
    throw std::bad_alloc();
  });
  clock.Advance(absl::ZeroDuration());
  EXPECT_TRUE(clock.Cancel(timer));
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(calls, 1);
}

// Who is told that it fires counts on it, and may wait for it.
TEST(FakeClockTest, ATimerWithoutMemoryThatIsCancelledTooLateFiresAgain) {
  FakeClock clock;
  Clock::TimerId timer = 0;
  int calls = 0;
  timer = clock.At(clock.Now(), [&] {
    EXPECT_FALSE(clock.Cancel(timer));
    if (++calls < 3) throw std::bad_alloc();
  });
  clock.Advance(absl::Seconds(1));
  EXPECT_EQ(calls, 3);
  EXPECT_FALSE(clock.Cancel(timer));
}

TEST(FakeClockTest, InfiniteFutureNeverFires) {
  FakeClock clock;
  const Clock::TimerId timer = clock.At(absl::InfiniteFuture(), [] { FAIL(); });
  clock.AdvanceTo(absl::InfiniteFuture());
  EXPECT_TRUE(clock.Cancel(timer));
}

// Each of the clocks.
class AnyClockTest : public testing::TestWithParam<bool> {
 protected:
  const std::unique_ptr<Clock> clock_ =
      GetParam() ? NewSystemClock().value() : std::make_unique<FakeClock>();
};

TEST_P(AnyClockTest, CancelDestroysTheCallback) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + absl::Hours(1), [owned = std::move(owned)] { FAIL(); });
  EXPECT_FALSE(clock_->Cancel(timer + 1));
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(clock_->Cancel(timer));
  EXPECT_TRUE(watch.expired());
  EXPECT_FALSE(clock_->Cancel(timer));
}

TEST_P(AnyClockTest, TheCallbackOfACancelledTimerMayUseTheClock) {
  struct Canceller {
    Canceller(Clock* clock, Clock::TimerId other) : clock(clock), other(other) {}
    Clock* const clock;
    const Clock::TimerId other;
    ~Canceller() { EXPECT_TRUE(clock->Cancel(other)); }
  };
  const Clock::TimerId other = clock_->At(clock_->Now() + absl::Hours(1), [] {});
  auto canceller = std::make_shared<Canceller>(clock_.get(), other);
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + absl::Hours(1), [canceller = std::move(canceller)] {});
  EXPECT_TRUE(clock_->Cancel(timer));
  EXPECT_FALSE(clock_->Cancel(other));
}

INSTANTIATE_TEST_SUITE_P(Clocks, AnyClockTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "System" : "Fake"; });

TEST(SystemClockTest, NeverFiresEarlyAndNeverGoesBack) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  absl::Time last = clock->Now();
  for (int i = 0; i < 20; ++i) {
    absl::Notification fired;
    const absl::Time when = clock->Now() + absl::Microseconds(300 * i);
    clock->At(when, [&] {
      EXPECT_GE(clock->Now(), when);
      fired.Notify();
    });
    fired.WaitForNotification();
    EXPECT_GE(clock->Now(), last);
    last = clock->Now();
  }
}

TEST(SystemClockTest, AnEarlierTimerOvertakesALaterOne) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  const Clock::TimerId never = clock->At(absl::InfiniteFuture(), [] { FAIL(); });
  const Clock::TimerId late = clock->At(clock->Now() + absl::Hours(100), [] { FAIL(); });
  absl::Notification fired, past;
  clock->At(clock->Now() + absl::Milliseconds(2), [&] { fired.Notify(); });
  fired.WaitForNotification();
  clock->At(absl::InfinitePast(), [&] { past.Notify(); });
  past.WaitForNotification();
  EXPECT_TRUE(clock->Cancel(late));
  EXPECT_TRUE(clock->Cancel(never));
}

TEST(SystemClockTest, ATimerWithoutMemoryFiresAgain) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  absl::Notification done;
  int calls = 0;  // on the clock's thread
  clock->At(clock->Now(), [&] {
    if (++calls < 3) throw std::bad_alloc();
    done.Notify();
  });
  done.WaitForNotification();
}

TEST(SystemClockTest, TimersOfTheSameTimeKeepTheirOrder) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  const absl::Time when = clock->Now() + absl::Milliseconds(5);
  std::vector<int> fired;  // on the clock's thread, then read after `all`
  absl::Notification all;
  for (int i = 0; i < 10; ++i) {
    clock->At(when, [&, i] {
      fired.push_back(i);
      if (i == 9) all.Notify();
    });
  }
  all.WaitForNotification();
  // `when` may have passed while they were being set; even then the order holds.
  EXPECT_EQ(fired, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(SystemClockTest, CallbacksMayUseTheClock) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  absl::Notification done;
  clock->At(clock->Now(), [&] {
    const Clock::TimerId other = clock->At(clock->Now(), [] { FAIL(); });
    EXPECT_TRUE(clock->Cancel(other));
    clock->At(clock->Now(), [&] { done.Notify(); });
  });
  done.WaitForNotification();
}

TEST(SystemClockTest, DestructionDropsWhatHasNotFired) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  std::unique_ptr<Clock> clock = NewSystemClock().value();
  clock->At(clock->Now() + absl::Hours(1), [owned = std::move(owned)] { FAIL(); });
  clock = nullptr;
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace distgrad
