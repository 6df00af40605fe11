// Tasks that block and are replaced, closing and joining, loops that run tasks, and missing
// threads.
#include "core/base/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/blocking.h"
#include "core/base/blocking_observer.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/event_loop.h"
#include "core/base/fake_clock.h"
#include "core/base/log.h"
#include "core/base/thread.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

std::string ThreadName() {
  char name[16];
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

// Counts how many are inside at once, at most.
class Peak {
 public:
  void Enter() {
    const int now = ++inside_;
    int seen = peak_;
    while (seen < now && !peak_.compare_exchange_weak(seen, now)) {
    }
  }
  void Leave() { --inside_; }
  int value() const { return peak_; }

 private:
  std::atomic<int> inside_{0}, peak_{0};
};

TEST(ThreadPoolTest, RunsAsManyAtOnceAsItsSizeAndNoMore) {
  ThreadPool pool("p", 3);
  auto* all = new absl::Barrier(3);
  Peak peak;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(pool.Schedule([&] {
      peak.Enter();
      if (all->Block()) delete all;
      peak.Leave();
    }));
  }
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(pool.Schedule([&] {
      peak.Enter();
      std::this_thread::yield();
      peak.Leave();
    }));
  }
  pool.Join();
  EXPECT_EQ(peak.value(), 3);
}

TEST(ThreadPoolTest, OneThreadKeepsTheOrder) {
  ThreadPool pool("p", 1);
  std::vector<int> ran;
  for (int i = 0; i < 1000; ++i) pool.Schedule([&ran, i] { ran.push_back(i); });
  pool.Join();
  ASSERT_EQ(ran.size(), 1000u);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(ran[i], i);
}

// A task that schedules the next one and waits for it, `depth` times.
void Nest(ThreadPool& pool, int depth, const std::function<void()>& at_bottom) {
  if (depth == 0) return at_bottom();
  absl::Notification done;
  ASSERT_TRUE(pool.Schedule([&] {
    Nest(pool, depth - 1, at_bottom);
    done.Notify();
  }));
  BlockingScope blocking;
  done.WaitForNotification();
}

TEST(ThreadPoolTest, FiftyNestedWaitsEndOnOneThread) {
  ThreadPool pool("p", 1);
  int bottoms = 0;
  Nest(pool, 50, [&] { ++bottoms; });
  Nest(pool, 50, [&] { ++bottoms; });
  EXPECT_EQ(bottoms, 2);
}

TEST(ThreadPoolTest, FiftyTasksThatNestAtOnce) {
  ThreadPool pool("p", 2);
  absl::BlockingCounter bottoms(50);
  for (int i = 0; i < 50; ++i) {
    pool.Schedule([&] { Nest(pool, 3, [&] { bottoms.DecrementCount(); }); });
  }
  bottoms.Wait();  // before Close: they schedule
  pool.Join();
}

TEST(ThreadPoolTest, SpareThreadsAreUsedAgain) {
  ThreadPool pool("p", 1);
  absl::Mutex mu;
  std::set<std::string> names;
  for (int i = 0; i < 20; ++i) {
    Nest(pool, 5, [] {});
    Nest(pool, 3, [&] {
      absl::MutexLock lock(&mu);
      names.insert(ThreadName());
    });
  }
  pool.Join();
  for (const std::string& name : names) {
    EXPECT_TRUE(std::set<std::string>({"p-0", "p-1", "p-2", "p-3", "p-4"}).count(name)) << name;
  }
}

TEST(ThreadPoolTest, SettlesAtItsSizeWhenBlockedTasksGoOn) {
  ThreadPool pool("p", 1);
  absl::Notification unblock, unblocked, end;
  pool.Schedule([&] {
    {
      BlockingScope outer;
      BlockingScope inner;  // nests, and counts once
      unblock.WaitForNotification();
    }
    unblocked.Notify();
    end.WaitForNotification();
  });
  pool.Schedule([&] {
    unblock.Notify();
    end.WaitForNotification();
  });
  unblocked.WaitForNotification();  // two run now
  Peak peak;
  for (int i = 0; i < 100; ++i) {
    pool.Schedule([&] {
      peak.Enter();
      std::this_thread::yield();
      peak.Leave();
    });
  }
  EXPECT_EQ(peak.value(), 0);
  end.Notify();
  pool.Join();
  EXPECT_EQ(peak.value(), 1);
}

TEST(ThreadPoolTest, JoinRunsWhatWasAccepted) {
  std::atomic<int> ran{0};
  ThreadPool pool("p", 2);
  absl::Notification go;
  for (int i = 0; i < 2; ++i) pool.Schedule([&] { go.WaitForNotification(); });
  for (int i = 0; i < 100; ++i) pool.Schedule([&] { ++ran; });
  pool.Close();
  EXPECT_EQ(ran, 0);
  go.Notify();
  pool.Join();
  EXPECT_EQ(ran, 100);
  pool.Join();  // again is fine
}

TEST(ThreadPoolTest, ABlockedTaskIsReplacedAfterClose) {
  ThreadPool pool("p", 1);
  absl::Notification closed, second;
  pool.Schedule([&] {
    closed.WaitForNotification();
    BlockingScope blocking;
    second.WaitForNotification();
  });
  pool.Schedule([&] { second.Notify(); });
  pool.Close();
  closed.Notify();
  pool.Join();
}

TEST(ThreadPoolTest, ScheduleAfterCloseDestroysTheTaskUnrun) {
  ThreadPool pool("p", 1);
  pool.Close();
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  EXPECT_FALSE(pool.Schedule([owned = std::move(owned)] { FAIL(); }));
  EXPECT_TRUE(watch.expired());
}

TEST(ThreadPoolTest, ATaskMayCloseThePool) {
  ThreadPool pool("p", 1);
  std::atomic<bool> accepted{true};
  pool.Schedule([&] {
    pool.Close();
    accepted = pool.Schedule([] {});
  });
  pool.Join();
  EXPECT_FALSE(accepted);
}

TEST(ThreadPoolTest, SeveralMayJoin) {
  ThreadPool pool("p", 2);
  std::atomic<int> ran{0};
  for (int i = 0; i < 50; ++i) pool.Schedule([&] { ++ran; });
  std::vector<std::thread> joiners;
  for (int i = 0; i < 3; ++i) {
    joiners.emplace_back([&] {
      pool.Join();
      EXPECT_EQ(ran, 50);
    });
  }
  for (std::thread& joiner : joiners) joiner.join();
}

TEST(ThreadPoolTest, AJoinEndsAtItsDeadline) {
  ThreadPool pool("p", 2);
  absl::Notification began, go;
  pool.Schedule([&] {
    began.Notify();
    go.WaitForNotification();
  });
  began.WaitForNotification();
  EXPECT_FALSE(pool.Join(absl::InfinitePast()));
  EXPECT_FALSE(pool.Join(Deadline::After(absl::Milliseconds(1))));
  EXPECT_EQ(pool.thread_count(), 1u);
  // One that waits without a limit keeps none that has one.
  std::thread joiner([&] { EXPECT_TRUE(pool.Join()); });
  EXPECT_FALSE(pool.Join(Deadline::After(absl::Milliseconds(1))));
  go.Notify();
  EXPECT_TRUE(pool.Join(Deadline::After(absl::Hours(1))));
  joiner.join();
  EXPECT_EQ(pool.thread_count(), 0u);
  EXPECT_TRUE(pool.Join(absl::InfinitePast()));
}

TEST(ThreadPoolTest, ThreadsKnowTheirPoolAndHaveNames) {
  ThreadPool other("other", 1), pool("a-rather-long-name", 1);
  EXPECT_FALSE(pool.OnThisPool());
  pool.Schedule([&] {
    EXPECT_TRUE(pool.OnThisPool());
    EXPECT_FALSE(other.OnThisPool());
    EXPECT_EQ(ThreadName(), "a-rather-long-n");
    BlockingScope blocking;
    EXPECT_TRUE(pool.OnThisPool());
  });
  other.Schedule([] { EXPECT_EQ(ThreadName(), "other-0"); });
  BlockingScope on_no_pool;
}

TEST(ThreadPoolTest, SchedulesFromManyThreads) {
  ThreadPool pool("p", 3);
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        pool.Schedule([&, i] {
          if (i % 10 == 0) {
            BlockingScope blocking;
            std::this_thread::yield();
          }
          ++ran;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  pool.Join();
  EXPECT_EQ(ran, 4000);
}

TEST(ThreadPoolDeathTest, ATaskMustNotJoinItsOwnPool) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        ThreadPool pool("p", 1);
        pool.Schedule([&] { pool.Join(); });
        pool.Join();
      },
      "joins its own pool");
}

// The thread that handles its events has time for one task of `work`.
class IdleLoop : public EventLoop {
 public:
  explicit IdleLoop(const void* work = nullptr) : work_(work) {}
  void Run(absl::AnyInvocable<void()> task) override { task(); }
  bool CanRunDeferred(const void* work) override { return !task_ && work == work_; }
  void RunDeferred(absl::AnyInvocable<void()> task) override { task_ = std::move(task); }

  // What `handler` leaves behind.
  absl::AnyInvocable<void()> Handle(absl::FunctionRef<void()> handler) {
    SetCurrent(this);
    handler();
    SetCurrent(nullptr);
    return std::exchange(task_, nullptr);
  }

  // What it runs deferred as a task of `pool`, once that has a slot for it.
  absl::AnyInvocable<void()> Defer(ThreadPool& pool) {
    absl::AnyInvocable<void()> deferred;
    while (deferred == nullptr) deferred = Handle([&] { pool.ScheduleInline([] {}, work_); });
    return deferred;
  }

 private:
  const void* const work_;
  absl::AnyInvocable<void()> task_;
};

TEST(ThreadPoolTest, ALoopsThreadRunsATaskAsOneOfThePool) {
  IdleLoop loop;
  ThreadPool pool("p", 1);
  std::vector<int> ran;
  absl::Notification second_ran;
  auto deferred = loop.Handle([&] {
    ASSERT_TRUE(pool.ScheduleInline([&] {
      EXPECT_TRUE(pool.OnThisPool());
      ran.push_back(1);
      // It has the pool's one slot, until it waits.
      BlockingScope blocking;
      second_ran.WaitForNotification();
    }));
    EXPECT_TRUE(pool.ScheduleInline([&] {
      ran.push_back(2);
      second_ran.Notify();
    }));
  });
  ASSERT_TRUE(deferred);
  EXPECT_TRUE(ran.empty());
  deferred();
  EXPECT_FALSE(pool.OnThisPool());
  pool.Join();
  EXPECT_EQ(ran, std::vector<int>({1, 2}));
}

TEST(ThreadPoolTest, ALoopsThreadGoesOnWithWhatWaits) {
  IdleLoop loop;
  ThreadPool pool("p", 1);
  std::vector<std::thread::id> ran;
  const auto task = [&] { ran.push_back(std::this_thread::get_id()); };
  auto deferred = loop.Handle([&] {
    for (int i = 0; i < 3; ++i) pool.ScheduleInline(task);
  });
  deferred();
  EXPECT_EQ(ran, std::vector<std::thread::id>(3, std::this_thread::get_id()));
}

TEST(ThreadPoolTest, JoinWaitsForTasksOnALoopsThread) {
  IdleLoop loop;
  ThreadPool pool("p", 1);
  bool ran = false;
  auto deferred = loop.Handle([&] { pool.ScheduleInline([&] { ran = true; }); });
  EXPECT_FALSE(pool.Join(absl::InfinitePast()));
  std::thread thread([&] { deferred(); });
  EXPECT_TRUE(pool.Join(Deadline::After(absl::Hours(1))));
  EXPECT_TRUE(ran);
  thread.join();
  EXPECT_FALSE(loop.Handle([&] { EXPECT_FALSE(pool.ScheduleInline([] {})); }));
}

TEST(ThreadPoolTest, WhatALoopCannotRunDeferredThePoolRuns) {
  IdleLoop loop;
  ThreadPool pool("p", 1);
  absl::Notification ran;
  const int work = 0;
  EXPECT_FALSE(loop.Handle([&] { pool.ScheduleInline([&] { ran.Notify(); }, &work); }));
  ran.WaitForNotification();
}

// Its user's, say, who waits for that work and for nothing else.
TEST(ThreadPoolTest, ALoopsThreadLeavesWhatIsNotOfItsWorkToThePool) {
  const int work = 0;
  IdleLoop loop(&work);
  ThreadPool pool("p", 1);
  std::thread::id ran;
  auto deferred = loop.Defer(pool);
  ASSERT_TRUE(pool.Schedule([&] { ran = std::this_thread::get_id(); }));
  pool.Close();
  deferred();
  pool.Join();
  EXPECT_NE(ran, std::thread::id());
  EXPECT_NE(ran, std::this_thread::get_id());
}

// ------------------------------------------------------------------------- No more threads

TEST(NoThreadsTest, AThreadThatIsNotToBeHadIsAStatus) {
  {
    const NoThreads no_threads;
    const absl::Status none = StartThread("dg-none", [] { FAIL(); }).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kResourceExhausted) << none;
    EXPECT_TRUE(absl::StrContains(none.message(), "dg-none")) << none;
    EXPECT_EQ(NewSystemClock().status().code(), absl::StatusCode::kResourceExhausted);
  }
  StartThread("dg-some", [] {}).value().join();
}

TEST(NoThreadsTest, APoolWithoutAThreadTakesNothing) {
  ThreadPool pool("p", 2);
  const auto owned = std::make_shared<int>();
  {
    const NoThreads no_threads;
    EXPECT_EQ(pool.Start().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_FALSE(pool.Schedule([owned] {}));
    EXPECT_FALSE(pool.ScheduleNow([owned] {}));
    EXPECT_EQ(owned.use_count(), 1);
  }
  absl::Notification ran;
  EXPECT_TRUE(pool.Schedule([&] { ran.Notify(); })) << "now there are some";
  ran.WaitForNotification();
}

// A task is taken, and runs once there is memory for a thread, or is not taken.
TEST(NoThreadsTest, ATaskThatFindsNoMemoryLeavesThePoolAsItWas) {
  FailEachAllocation([](absl::FunctionRef<void()> lack) {
    ThreadPool pool("memory", 1);
    std::atomic<int> ran{0};
    int taken = 0;
    lack();
    try {
      taken += pool.Schedule([&] { ++ran; });
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not taken
    }
    const bool failed = FailAllocation(-1);
    taken += pool.Schedule([&] { ++ran; });
    pool.Join();
    EXPECT_EQ(ran, taken);
    EXPECT_EQ(taken, failed ? 1 : 2);
    return failed;
  });
}

// Nor does one that is started, and finds none, keep a slot.
TEST(NoThreadsTest, AStartThatFindsNoMemoryLeavesThePoolAsItWas) {
  FailEachAllocation([](absl::FunctionRef<void()> lack) {
    ThreadPool pool("memory", 1);
    lack();
    const absl::Status started = pool.Start();
    const bool failed = FailAllocation(-1);
    EXPECT_EQ(started.code(),
              failed ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk);
    bool ran = false;
    EXPECT_TRUE(pool.Schedule([&] { ran = true; }));
    pool.Join();
    EXPECT_TRUE(ran);
    return failed;
  });
}

TEST(NoThreadsTest, ATaskForALoopThatFindsNoMemoryKeepsNoSlot) {
  FailEachAllocation([](absl::FunctionRef<void()> lack) {
    IdleLoop loop;
    ThreadPool pool("memory", 1);
    std::atomic<int> ran{0};
    int taken = 0;
    bool failed = false;
    auto deferred = loop.Handle([&] {
      lack();
      try {
        taken += pool.ScheduleInline([&] { ++ran; }, nullptr);
      } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not taken
      }
      failed = FailAllocation(-1);
    });
    if (deferred != nullptr) deferred();
    taken += pool.Schedule([&] { ++ran; });
    pool.Join();
    EXPECT_EQ(ran, taken);
    EXPECT_EQ(taken, failed ? 1 : 2);
    return failed;
  });
}

// The only thread waits for a task, for whose thread memory lacked: nothing else ever happens here.
TEST(NoThreadsTest, AThreadForWhichMemoryLackedIsAskedForAgain) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  FailEachAllocation([&](absl::FunctionRef<void()> lack) {
    ThreadPool pool("memory", 1, clock.get());
    absl::Notification blocked, awaited;
    EXPECT_TRUE(pool.Schedule([&] {
      const BlockingScope blocking;
      blocked.Notify();
      EXPECT_TRUE(awaited.WaitForNotificationWithTimeout(absl::Minutes(1)));
    }));
    blocked.WaitForNotification();
    lack();
    bool taken = false;
    try {
      taken = pool.Schedule([&] { awaited.Notify(); });
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is not taken
    }
    const bool failed = FailAllocation(-1);
    if (!taken) taken = pool.Schedule([&] { awaited.Notify(); });
    EXPECT_TRUE(taken);
    pool.Join();
    return failed;
  });
}

// Nor does a thread that gives its slot away as it waits lose what waits for that.
TEST(NoThreadsTest, AThreadThatWaitsFindsNoMemoryForAnother) {
  const std::unique_ptr<Clock> clock = NewSystemClock().value();
  FailEachAllocation([&](absl::FunctionRef<void()> lack) {
    bool failed = false;
    ThreadPool pool("memory", 1, clock.get());
    absl::Notification both_came;
    EXPECT_TRUE(pool.Schedule([&] {
      const auto awaited = std::make_shared<absl::Notification>();
      EXPECT_TRUE(pool.Schedule([awaited] { awaited->Notify(); }));
      both_came.Notify();
      lack();
      const BlockingScope blocking;
      failed = FailAllocation(-1);
      EXPECT_TRUE(awaited->WaitForNotificationWithTimeout(absl::Minutes(1)));
    }));
    both_came.WaitForNotification();
    pool.Join();
    return failed;
  });
}

TEST(NoThreadsTest, ARetryThatFindsNoMemoryIsNotTheLast) {
  FailEachAllocation([](absl::FunctionRef<void()> lack) {
    FakeClock clock;
    ThreadPool pool("memory", 1, &clock);
    absl::Notification blocked, awaited;
    EXPECT_TRUE(pool.Schedule([&] {
      const BlockingScope blocking;
      blocked.Notify();
      awaited.WaitForNotification();
    }));
    blocked.WaitForNotification();
    {
      const NoThreads no_threads;
      EXPECT_TRUE(pool.Schedule([&] { awaited.Notify(); }));
    }
    lack();
    clock.Advance(ThreadPool::kRetryDelay);
    const bool failed = FailAllocation(-1);
    clock.Advance(ThreadPool::kRetryDelay);
    EXPECT_TRUE(awaited.WaitForNotificationWithTimeout(absl::Minutes(1)));
    if (!awaited.HasBeenNotified()) awaited.Notify();
    pool.Join();
    EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
    return failed;
  });
}

// An exception there would end the process.
TEST(NoThreadsTest, AThreadThatHasNothingToDoNeedsNoMemory) {
  ThreadPool pool("memory", 1);
  absl::Notification ran;
  ASSERT_TRUE(pool.Schedule([] { FailAllocation(0); }));
  // Taken once the thread has given its slot back.
  while (!pool.ScheduleNow([&] {
    FailAllocation(-1);
    ran.Notify();
  })) {
    std::this_thread::yield();
  }
  ran.WaitForNotification();
}

TEST(NoThreadsTest, APoolThatIsStartedTakesAllAndRunsItLater) {
  ThreadPool pool("p", 2);
  ASSERT_TRUE(pool.Start().ok());
  const NoThreads no_threads;
  absl::Notification began, unblock;
  ASSERT_TRUE(pool.Schedule([&] {
    const BlockingScope blocking;
    began.Notify();
    unblock.WaitForNotification();
  }));
  began.WaitForNotification();
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(pool.Schedule([&] { ++ran; }));
  EXPECT_FALSE(pool.ScheduleNow([&] { ++ran; }));
  EXPECT_EQ(ran, 0);
  unblock.Notify();
  pool.Join();
  EXPECT_EQ(ran, 100);
}

// The only thread waits for a task that was refused a thread: nothing else ever happens here.
TEST(NoThreadsTest, AThreadThatWasRefusedIsAskedForAgain) {
  FakeClock clock;
  ThreadPool pool("p", 1, &clock);
  ASSERT_TRUE(pool.Start().ok());
  absl::Notification blocked, awaited;
  {
    const NoThreads no_threads;
    ASSERT_TRUE(pool.Schedule([&] {
      const BlockingScope blocking;
      blocked.Notify();
      awaited.WaitForNotification();
    }));
    blocked.WaitForNotification();
    ASSERT_TRUE(pool.Schedule([&] { awaited.Notify(); }));
    clock.Advance(ThreadPool::kRetryDelay);
    EXPECT_FALSE(awaited.HasBeenNotified());
  }
  clock.Advance(ThreadPool::kRetryDelay);
  EXPECT_TRUE(awaited.WaitForNotificationWithTimeout(absl::Minutes(1)));
  if (!awaited.HasBeenNotified()) awaited.Notify();
  pool.Join();
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
}

// It waits for nobody, and nobody says that it does.
TEST(NoThreadsTest, AThreadForATaskThatIsRefusedIsNotAskedForAgain) {
  FakeClock clock;
  ThreadPool pool("p", 1, &clock);
  std::atomic<int> lines = 0;
  SetLogSink([&](LogSeverity, absl::string_view) { ++lines; });
  const absl::Cleanup reset = [] { SetLogSink(nullptr); };
  const auto expect_silence = [&] {
    EXPECT_EQ(lines, 0);
    EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
  };
  {
    const NoThreads no_threads;
    EXPECT_FALSE(pool.Schedule([] {}));
    expect_silence();
  }
  absl::Notification blocked, unblock;
  ASSERT_TRUE(pool.Schedule([&] {
    const BlockingScope blocking;
    blocked.Notify();
    unblock.WaitForNotification();
  }));
  blocked.WaitForNotification();
  {
    const NoThreads no_threads;
    EXPECT_FALSE(pool.ScheduleNow([] {}));
    expect_silence();
    EXPECT_TRUE(pool.Schedule([] {}));  // This one does wait.
    EXPECT_EQ(lines, 1);
    EXPECT_NE(clock.NextTimer(), absl::InfiniteFuture());
  }
  unblock.Notify();
  pool.Join();
}

// A retry that has not come is taken back.
TEST(NoThreadsTest, APoolEndsWhileItsClockHasARetry) {
  FakeClock clock;
  {
    ThreadPool pool("p", 2, &clock);
    ASSERT_TRUE(pool.Start().ok());
    const NoThreads no_threads;
    absl::Notification began, unblock;
    std::atomic<int> ran{0};
    ASSERT_TRUE(pool.Schedule([&] {
      began.Notify();
      unblock.WaitForNotification();
    }));
    began.WaitForNotification();
    ASSERT_TRUE(pool.Schedule([&] { ++ran; }));
    EXPECT_NE(clock.NextTimer(), absl::InfiniteFuture());
    unblock.Notify();
    pool.Join();
    EXPECT_EQ(ran, 1);
  }
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture());
}

// The pool's own thread has gone home, and the machine gives none: who else would run it?
TEST(NoThreadsTest, WhatWasAcceptedTheLoopsThreadRunsIfThereIsNoOther) {
  const int work = 0;
  IdleLoop loop(&work);
  FakeClock clock;
  bool ran = false;
  ThreadPool pool("p", 1, &clock);
  ASSERT_TRUE(pool.Start().ok());
  auto deferred = loop.Defer(pool);
  ASSERT_TRUE(pool.Schedule([&] { ran = true; }));
  pool.Close();
  while (pool.thread_count() > 1) std::this_thread::yield();
  {
    const NoThreads no_threads;
    deferred();
  }
  EXPECT_TRUE(pool.Join());
  EXPECT_TRUE(ran);
}

// As one may for which there is no memory.
TEST(ThreadPoolTest, AnObserverThatThrowsLeavesTheThreadWithItsPool) {
  struct Thrower : BlockingObserver {
    void OnBlocking() override { throw std::bad_alloc(); }
  };
  absl::Notification ran;
  ThreadPool pool("p", 1);
  ASSERT_TRUE(pool.Schedule([&] {
    {
      Thrower thrower;
      EXPECT_THROW(BlockingScope(), std::bad_alloc);
    }
    BlockingScope blocking;
    EXPECT_TRUE(ran.WaitForNotificationWithTimeout(absl::Seconds(30)));
  }));
  ASSERT_TRUE(pool.Schedule([&] { ran.Notify(); }));
  pool.Join();
}

TEST(NoThreadsTest, WhatBlocksStartsNoMoreThanSoManyThreads) {
  constexpr int kTasks = ThreadPool::kMostSpareThreads + 100;
  ThreadPool pool("p", 2);
  absl::Notification unblock;
  Peak peak;
  absl::BlockingCounter begun(ThreadPool::kMostSpareThreads + 2);
  std::atomic<int> places{ThreadPool::kMostSpareThreads + 2}, ran{0};
  for (int i = 0; i < kTasks; ++i) {
    ASSERT_TRUE(pool.Schedule([&] {
      peak.Enter();
      if (places.fetch_sub(1) > 0) begun.DecrementCount();
      {
        const BlockingScope blocking;
        unblock.WaitForNotification();
      }
      peak.Leave();
      ++ran;
    }));
  }
  begun.Wait();
  unblock.Notify();
  pool.Join();
  EXPECT_EQ(ran, kTasks);
  EXPECT_EQ(peak.value(), static_cast<int>(ThreadPool::kMostSpareThreads + 2));
}

}  // namespace
}  // namespace distgrad
