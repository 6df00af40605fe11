// Tasks, timers and sockets of a loop: on its own thread, on borrowed ones, and aside.
#include "core/net/loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "core/base/clock.h"
#include "core/base/future.h"
#include "core/base/thread_pool.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/no_threads.h"
#include "tests/testing/waiting_thread.h"

namespace distgrad {
namespace {

class LoopTest : public testing::Test {
 protected:
  void SetUp() override {
    auto clock = NewSystemClock();
    ASSERT_TRUE(clock.ok()) << clock.status();
    clock_ = *std::move(clock);
    auto loop = Loop::Start("loop-test", clock_.get());
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }

  std::unique_ptr<Clock> clock_;
  std::unique_ptr<Loop> loop_;
};

TEST_F(LoopTest, TasksKnowTheirLoop) {
  EXPECT_EQ(EventLoop::Current(), nullptr);
  absl::Notification ran;
  loop_->Run([&] {
    EXPECT_EQ(EventLoop::Current(), loop_.get());
    // From its own thread: after this task, not inside it.
    loop_->Run([&] { ran.Notify(); });
    EXPECT_FALSE(ran.HasBeenNotified());
  });
  ran.WaitForNotification();
}

TEST_F(LoopTest, ATaskThatWaitsDoesNotHoldUpTheNext) {
  absl::Notification first_waits, second_waits, third_ran;
  absl::BlockingCounter over(2);
  loop_->Run([&] {
    const std::thread::id before = std::this_thread::get_id();
    {
      BlockingScope blocking;
      first_waits.Notify();
      third_ran.WaitForNotification();
    }
    EXPECT_EQ(std::this_thread::get_id(), before);
    EXPECT_EQ(EventLoop::Current(), nullptr);  // this thread is not the loop's any more
    {
      BlockingScope again;  // and so nobody takes its place
    }
    over.DecrementCount();
  });
  // What was there when the first began to wait, and what comes later.
  loop_->Run([&] {
    BlockingScope blocking;
    second_waits.Notify();
    third_ran.WaitForNotification();
    over.DecrementCount();
  });
  first_waits.WaitForNotification();
  second_waits.WaitForNotification();
  loop_->Run([&] { third_ran.Notify(); });
  over.Wait();
}

TEST_F(LoopTest, TimersGoOnWhileATaskWaits) {
  absl::Notification fired, over;
  loop_->After(absl::ZeroDuration(), [&] {
    loop_->After(absl::ZeroDuration(), [&] { fired.Notify(); });
    BlockingScope blocking;
    fired.WaitForNotification();
    over.Notify();
  });
  over.WaitForNotification();
}

TEST_F(LoopTest, ManyTasksWaitOneAfterTheOther) {
  constexpr int kTasks = 50;
  absl::BlockingCounter over(kTasks);
  for (int i = 0; i < kTasks; ++i) {
    loop_->Run([&] {
      absl::Notification next;
      loop_->Run([&] { next.Notify(); });
      {
        BlockingScope blocking;
        next.WaitForNotification();
      }
      over.DecrementCount();
    });
  }
  over.Wait();
}

// Has `task` run by this thread, which the loop borrows.
void RunBorrowed(Loop& loop, absl::FunctionRef<void()> task) {
  const std::unique_ptr<EventLoop::BorrowedThread> borrowed = loop.BorrowThread();
  ASSERT_NE(borrowed, nullptr);
  std::atomic<bool> ran = false;
  while (!ran) {
    // The own thread may be faster.
    absl::Notification over;
    loop.Run([&, me = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == me) {
        ran = true;
        task();
      }
      over.Notify();
    });
    while (!over.HasBeenNotified()) borrowed->PollOnce();
  }
}

TEST_F(LoopTest, ABorrowedThreadRunsWhatIsDue) {
  RunBorrowed(*loop_, [&] {
    EXPECT_EQ(EventLoop::Current(), loop_.get());
    EXPECT_EQ(loop_->BorrowThread(), nullptr);  // one on this thread is enough
  });
  EXPECT_EQ(EventLoop::Current(), nullptr);
}

TEST_F(LoopTest, OneThatFindsNoMemoryToBorrowAThreadBorrowsTheNext) {
  FailAllocation(0);
  EXPECT_THROW(loop_->BorrowThread(), std::bad_alloc);
  FailAllocation(-1);
  EXPECT_NE(loop_->BorrowThread(), nullptr);
}

TEST_F(LoopTest, WhatABorrowedThreadLeavesTheOwnThreadDoes) {
  absl::Notification task_ran, timer_fired, later_ran;
  RunBorrowed(*loop_, [&] {
    loop_->Run([&] { task_ran.Notify(); });
    loop_->After(absl::Milliseconds(1), [&] { timer_fired.Notify(); });
  });
  task_ran.WaitForNotification();
  timer_fired.WaitForNotification();
  loop_->Run([&] { later_ran.Notify(); });
  later_ran.WaitForNotification();
}

TEST_F(LoopTest, ABorrowedThreadThatWaitsLeavesTheLoopToTheOwnThread) {
  bool waited = false;
  RunBorrowed(*loop_, [&] {
    absl::Notification other_ran;
    loop_->Run([&] { other_ran.Notify(); });
    BlockingScope blocking;
    other_ran.WaitForNotification();
    waited = true;
  });
  EXPECT_TRUE(waited);
}

TEST_F(LoopTest, ASleepingBorrowedThreadWakesForWhatComes) {
  const auto borrowed = loop_->BorrowThread();
  // Until the own thread has made room.
  while (EventLoop::Current() == nullptr) borrowed->PollOnce();
  std::atomic<bool> fired = false, ran = false;
  loop_->After(absl::Milliseconds(1), [&] { fired = true; });
  while (!fired) EXPECT_TRUE(borrowed->Sleep(absl::InfiniteFuture()));
  std::thread other([&] { loop_->Run([&] { ran = true; }); });
  while (!ran) EXPECT_TRUE(borrowed->Sleep(absl::InfiniteFuture()));
  other.join();
  EXPECT_TRUE(borrowed->Sleep(absl::Now() + absl::Milliseconds(1)));
  std::thread waker([&] { loop_->WakeBorrowedThread(); });
  EXPECT_TRUE(borrowed->Sleep(absl::InfiniteFuture()));
  waker.join();
}

TEST_F(LoopTest, ABorrowedThreadThatGetsTheLeadPollsBeforeItSleeps) {
  const auto borrowed = loop_->BorrowThread();
  // Says that there is something, but the own thread hears it.
  std::thread([&] { loop_->WakeBorrowedThread(); }).join();
  absl::Notification heard;
  loop_->Run([&] { heard.Notify(); });
  heard.WaitForNotification();
  while (!borrowed->Sleep(absl::InfiniteFuture())) {
  }
}

// Has the loop's own thread run `task` deferred.
void RunDeferred(Loop& loop, Loop::Task task) {
  absl::Notification given;
  loop.Run([&] {
    ASSERT_TRUE(loop.CanRunDeferred(nullptr));
    loop.RunDeferred(std::move(task));
    EXPECT_FALSE(loop.CanRunDeferred(nullptr));  // one at a time
    given.Notify();
  });
  given.WaitForNotification();
}

TEST_F(LoopTest, WhatRunsAsideHoldsNothingUp) {
  EXPECT_FALSE(loop_->CanRunDeferred(nullptr));  // this is no thread of it
  absl::Notification first_over, second_over, go_on;
  RunDeferred(*loop_, [&] {
    EXPECT_EQ(EventLoop::Current(), nullptr);
    go_on.WaitForNotification();
    first_over.Notify();
  });
  // Of the thread that took over, which leaves it to a third.
  RunDeferred(*loop_, [&] {
    go_on.WaitForNotification();
    second_over.Notify();
  });
  absl::Notification fired;
  loop_->After(absl::Milliseconds(1), [&] { fired.Notify(); });
  fired.WaitForNotification();
  loop_->Run([&] { go_on.Notify(); });
  first_over.WaitForNotification();
  second_over.WaitForNotification();
}

TEST_F(LoopTest, ThreadsThatWereAsideComeBack) {
  std::set<std::thread::id> threads;
  for (int i = 0; i < 200; ++i) {
    absl::Notification over;
    std::thread::id thread;
    RunDeferred(*loop_, [&] {
      thread = std::this_thread::get_id();
      over.Notify();
    });
    over.WaitForNotification();
    threads.insert(thread);
  }
  // One that leads, one that follows, and some on their way back.
  EXPECT_LE(threads.size(), 20u);
}

TEST_F(LoopTest, ATaskThatWaitsDoesNotHoldUpWhatRunsAside) {
  absl::Notification over, may_wait;
  loop_->Run([&] {
    loop_->RunDeferred([&] { over.Notify(); });
    BlockingScope blocking;
    over.WaitForNotification();
    may_wait.Notify();
  });
  may_wait.WaitForNotification();
}

// Runs `in_task` in a task of a loop, where memory lacks as in FailEachAllocation(). Of the loop's
// threads all but the leader are busy, or some are free.
void RunWhileMemoryLacks(
    Clock* clock, absl::FunctionRef<bool(Loop& loop, absl::FunctionRef<void()> lack)> in_task) {
  for (const int busy : {20, 0}) {
    SCOPED_TRACE(absl::StrCat(busy, " threads are busy"));
    FailEachAllocation([&](absl::FunctionRef<void()> lack) {
      bool failed = false;
      absl::Notification over, ends;
      const std::unique_ptr<Loop> loop = Loop::Start("loop-test", clock).value();
      for (int i = 0; i < busy; ++i) RunDeferred(*loop, [&] { ends.WaitForNotification(); });
      loop->Run([&] {
        failed = in_task(*loop, lack);
        over.Notify();
      });
      over.WaitForNotification();
      ends.Notify();
      return failed;
    });
  }
}

TEST_F(LoopTest, WhatRunsAsideIsKeptUntilThereIsMemoryForIt) {
  RunWhileMemoryLacks(clock_.get(), [](Loop& loop, const auto& lack) -> bool {
    const auto ran = std::make_shared<absl::Notification>();
    EXPECT_TRUE(loop.CanRunDeferred(nullptr));
    loop.RunDeferred([ran] { ran->Notify(); });
    lack();
    const BlockingScope blocking;
    const bool failed = FailAllocation(-1);
    EXPECT_TRUE(ran->WaitForNotificationWithTimeout(absl::Minutes(1)));
    return failed;
  });
}

// It ends as it is given up again, with nobody to wait for. Where only its thread lacks memory,
// that comes later.
TEST_F(LoopTest, OneThatFindsNoMemoryDoesNotStartOrWorksAllTheSame) {
  int refused = 0;
  FailEachAllocation([&](absl::FunctionRef<void()> lack) {
    lack();
    try {
      const auto loop = Loop::Start("loop-test", clock_.get());
      const bool failed = FailAllocation(-1);
      EXPECT_TRUE(failed || loop.ok()) << loop.status();
      if (!loop.ok()) {
        ++refused;
        return failed;
      }
      const auto ran = std::make_shared<absl::Notification>();
      (*loop)->Run([ran] { ran->Notify(); });
      EXPECT_TRUE(ran->WaitForNotificationWithTimeout(absl::Minutes(1)));
      return failed;
    } catch (const std::bad_alloc&) {
      ++refused;
      return FailAllocation(-1);
    }
  });
  EXPECT_GT(refused, 0);
}

TEST_F(LoopTest, SomebodyLeadsWhileATaskWaitsThoughMemoryLacked) {
  RunWhileMemoryLacks(clock_.get(), [](Loop& loop, const auto& lack) -> bool {
    const auto ran = std::make_shared<absl::Notification>();
    lack();
    const BlockingScope blocking;
    const bool failed = FailAllocation(-1);
    loop.Run([ran] { ran->Notify(); });
    EXPECT_TRUE(ran->WaitForNotificationWithTimeout(absl::Minutes(1)));
    return failed;
  });
}

// A pool that had none for what this thread was to run deferred leaves it to its loop.
TEST_F(LoopTest, SomebodyLeadsWhileATaskWaitsThoughAPoolsMemoryLacked) {
  RunWhileMemoryLacks(clock_.get(), [](Loop& loop, const auto& lack) -> bool {
    ThreadPool pool("pool", 1);
    lack();
    try {
      pool.ScheduleInline([] {});
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not taken
    }
    const bool failed = FailAllocation(-1);
    const auto ran = std::make_shared<absl::Notification>();
    const BlockingScope blocking;
    loop.Run([ran] { ran->Notify(); });
    EXPECT_TRUE(ran->WaitForNotificationWithTimeout(absl::Minutes(1)));
    return failed;
  });
}

// Of those that could take over one waits for a thread, which the machine refuses.
TEST_F(LoopTest, NothingRunsAsideWhereNoOtherThreadWouldLead) {
  absl::Notification over, end;
  // Now no thread is free.
  for (int i = 0; i < 20; ++i) RunDeferred(*loop_, [&] { end.WaitForNotification(); });
  {
    const NoThreads no_threads;
    loop_->Run([&] {
      { const BlockingScope blocking; }
      loop_->Run([&] {
        EXPECT_FALSE(loop_->CanRunDeferred(nullptr));
        over.Notify();
      });
    });
    over.WaitForNotification();
  }
  end.Notify();
  // And now some are.
  absl::Notification ran;
  std::function<void()> defer = [&] {
    if (!loop_->CanRunDeferred(nullptr)) return loop_->Run(defer);
    loop_->RunDeferred([&] { ran.Notify(); });
  };
  loop_->Run(defer);
  ran.WaitForNotification();
  loop_ = nullptr;  // Its threads use what is here.
}

TEST_F(LoopTest, JoinWaitsForWhatRunsAside) {
  absl::Notification go_on;
  bool over = false;
  RunDeferred(*loop_, [&] {
    go_on.WaitForNotification();
    over = true;
  });
  loop_->Close();
  go_on.Notify();
  loop_->Join();
  EXPECT_TRUE(over);
}

TEST_F(LoopTest, ABorrowedThreadRunsDeferredOnlyWhatItWaitsFor) {
  const int mine = 0, other = 0;
  const EventLoop::Awaiting awaiting(&mine);
  absl::Notification over;
  RunBorrowed(*loop_, [&] {
    EXPECT_FALSE(loop_->CanRunDeferred(nullptr));
    EXPECT_FALSE(loop_->CanRunDeferred(&other));
    ASSERT_TRUE(loop_->CanRunDeferred(&mine));
    loop_->RunDeferred([&, me = std::this_thread::get_id()] {
      EXPECT_EQ(std::this_thread::get_id(), me);
      EXPECT_EQ(EventLoop::Current(), nullptr);
      absl::Notification ran;
      loop_->Run([&] { ran.Notify(); });
      ran.WaitForNotification();
      over.Notify();
    });
  });
  EXPECT_TRUE(over.HasBeenNotified());
}

TEST_F(LoopTest, NothingIsLostAsBorrowedThreadsComeAndGo) {
  constexpr int kRounds = 2000;
  std::atomic<bool> over = false;
  std::vector<std::thread> borrowed;
  for (int i = 0; i < 2; ++i) {
    borrowed.emplace_back([&, i] {
      for (int looks = i; !over; ++looks) {
        const auto borrowed = loop_->BorrowThread();  // of one of them
        for (int j = looks % 7; borrowed != nullptr && j > 0; --j) {
          borrowed->PollOnce();
          if (j == 3) borrowed->Sleep(absl::Now() + absl::Microseconds(100));
        }
      }
    });
  }
  for (int i = 0; i < kRounds; ++i) {
    absl::Notification ran;
    if (i % 4 == 0) {
      loop_->After(absl::Microseconds(i % 100), [&] { ran.Notify(); });
    } else if (i % 4 == 1) {
      loop_->Run([&] {
        if (!loop_->CanRunDeferred(nullptr)) return ran.Notify();
        loop_->RunDeferred([&] { ran.Notify(); });
      });
    } else {
      loop_->Run([&] { ran.Notify(); });
    }
    ran.WaitForNotification();
  }
  over = true;
  for (std::thread& thread : borrowed) thread.join();
}

TEST_F(LoopTest, JoinWaitsForBorrowedThreads) {
  auto borrowed = loop_->BorrowThread();
  while (EventLoop::Current() != loop_.get()) borrowed->PollOnce();  // until it leads
  loop_->Close();
  std::atomic<bool> joined{false};
  {
    WaitingThread joins([&] {
      loop_->Join();
      joined = true;
    });
    for (int i = 0; i < 100; ++i) borrowed->PollOnce();
    EXPECT_TRUE(joins.Waits());
    EXPECT_FALSE(joined);
    borrowed = nullptr;
  }
  borrowed = loop_->BorrowThread();  // too late, and no harm
  borrowed->PollOnce();
}

TEST_F(LoopTest, JoinWaitsForTasksThatWait) {
  absl::Notification waits, go_on;
  bool over = false;
  loop_->Run([&] {
    BlockingScope blocking;
    waits.Notify();
    go_on.WaitForNotification();
    over = true;
  });
  waits.WaitForNotification();
  loop_->Close();
  go_on.Notify();
  loop_->Join();
  EXPECT_TRUE(over);
  // Nobody runs this; what it owns goes.
  auto owned = std::make_shared<int>(0);
  loop_->Run([owned] {});
  EXPECT_EQ(owned.use_count(), 1);
}

}  // namespace
}  // namespace distgrad
