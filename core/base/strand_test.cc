// The order of a strand's tasks, the thread that runs them, and tasks that throw or end the strand.
#include "core/base/strand.h"

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

void NothingIsThrown(std::exception_ptr) { ADD_FAILURE() << "a task has thrown"; }

TEST(StrandTest, AnIdleStrandRunsAtOnceOnTheCaller) {
  Strand strand(NothingIsThrown);
  std::thread::id ran;
  strand.Run([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(StrandTest, ATaskOfATaskRunsAfterIt) {
  Strand strand(NothingIsThrown);
  std::vector<int> order;
  strand.Run([&] {
    strand.Run([&] {
      order.push_back(2);
      strand.Run([&] { order.push_back(4); });
    });
    strand.Run([&] { order.push_back(3); });
    order.push_back(1);
  });
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
}

TEST(StrandTest, FourThreadsInOrderAndOneAtATime) {
  Strand strand(NothingIsThrown);
  constexpr int kTasks = 5000;
  std::vector<int> seen[4];  // guarded by the strand
  std::atomic<bool> inside{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kTasks; ++i) {
        strand.Run([&, t, i] {
          EXPECT_FALSE(inside.exchange(true));
          seen[t].push_back(i);
          inside = false;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_thread : seen) {
    ASSERT_EQ(of_thread.size(), static_cast<size_t>(kTasks));
    for (int i = 0; i < kTasks; ++i) ASSERT_EQ(of_thread[i], i);
  }
}

TEST(StrandTest, ABusyStrandTakesTheTaskAndReturns) {
  Strand strand(NothingIsThrown);
  absl::Notification started, go;
  std::thread::id busy, ran;
  std::thread other([&] {
    busy = std::this_thread::get_id();
    strand.Run([&] {
      started.Notify();
      go.WaitForNotification();
    });
  });
  started.WaitForNotification();
  strand.Run([&] { ran = std::this_thread::get_id(); });
  go.Notify();
  other.join();
  EXPECT_EQ(ran, busy);
}

TEST(StrandTest, ATaskIsGoneBeforeTheNextRuns) {
  Strand strand(NothingIsThrown);
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  bool gone = false;
  strand.Run([&, owned = std::move(owned)] { strand.Run([&] { gone = watch.expired(); }); });
  EXPECT_TRUE(gone);
}

TEST(StrandTest, ATaskThatThrowsEndsAloneAndItsOwnerIsTold) {
  std::vector<std::string> told;
  bool alive = false;
  std::weak_ptr<int> watch;
  Strand strand([&](std::exception_ptr thrown) {
    alive = !watch.expired();
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& e) {
      told.push_back(e.what());
    }
  });
  auto owned = std::make_shared<int>(1);
  watch = owned;
  bool ran = false;
  strand.Run([&, owned = std::move(owned)] {
    strand.Run([&] { ran = true; });
    throw std::runtime_error("out of luck");
  });
  EXPECT_TRUE(ran) << "what was handed in meanwhile";
  EXPECT_THAT(told, ::testing::ElementsAre("out of luck"));
  EXPECT_TRUE(alive) << "the task's own, until the owner has been told";
  EXPECT_TRUE(watch.expired());
  ran = false;
  strand.Run([&] { ran = true; });
  EXPECT_TRUE(ran) << "and what comes later";
}

TEST(StrandTest, WhoIsThereForAnothersTaskDoesNotSeeWhatItThrows) {
  std::atomic<int> told{0};
  Strand strand([&](std::exception_ptr) { ++told; });
  absl::Notification started, go;
  std::thread other([&] {
    strand.Run([&] {
      started.Notify();
      go.WaitForNotification();
    });
  });
  started.WaitForNotification();
  strand.Run([] { throw 1; });
  go.Notify();
  other.join();
  EXPECT_EQ(told, 1);
}

// What is handed in while this thread runs its own task, in the order in which it was.
TEST(StrandTest, WhoLeavesOthersTasksToAPoolRunsNone) {
  ThreadPool pool("strand", 1);
  Strand strand(NothingIsThrown);
  std::vector<int> order;
  std::vector<std::thread::id> ran;
  absl::Notification done;
  strand.Run(
      [&] {
        ran.push_back(std::this_thread::get_id());
        strand.Run([&] {
          order.push_back(1);
          ran.push_back(std::this_thread::get_id());
          strand.Run([&] { done.Notify(); });
        });
        strand.Run([&] { order.push_back(2); });
      },
      &pool);
  done.WaitForNotification();
  ASSERT_EQ(ran.size(), 2u);
  EXPECT_EQ(ran[0], std::this_thread::get_id()) << "its own, at once";
  EXPECT_NE(ran[1], std::this_thread::get_id());
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  pool.Join();
  bool inside = false;
  strand.Run([&] { strand.Run([&] { inside = true; }); }, &pool);
  EXPECT_TRUE(inside) << "there is nobody else";
}

// Whenever the others come: also when this thread has just seen that nothing waits.
TEST(StrandTest, WhoLeavesOthersTasksToAPoolRunsNoneThatComesAtTheEnd) {
  ThreadPool pool("strand", 1);
  Strand strand(NothingIsThrown);
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<bool> over{false};
  std::atomic<int> ran{0}, ran_here{0};
  std::thread other([&] {
    while (!over) {
      strand.Run([&] {
        ++ran;
        if (std::this_thread::get_id() == here) ++ran_here;
      });
    }
  });
  while (ran < 100000) strand.Run([] {}, &pool);
  over = true;
  other.join();
  pool.Join();
  EXPECT_EQ(ran_here, 0) << "of " << ran;
}

// What waits runs here if the pool has no memory for it, and the strand is idle afterwards.
TEST(StrandTest, WhereThePoolHasNoMemoryThisThreadRunsWhatWaits) {
  ThreadPool pool("strand", 1);
  Strand strand(NothingIsThrown);
  int failed = 0;
  for (int i = 0; i < 100; ++i) {
    bool ran = false;
    absl::Notification waits, go;
    // Behind this one, so that it does not run there at once.
    ASSERT_TRUE(pool.Schedule([&] { go.WaitForNotification(); }));
    for (int before = 0; before < i; ++before) pool.Schedule([] {});
    strand.Run(
        [&] {
          strand.Run([&] {
            ran = true;
            waits.Notify();
          });
          FailAllocation(0);
        },
        &pool);
    failed += FailAllocation(-1);
    go.Notify();
    waits.WaitForNotification();
    EXPECT_TRUE(ran);
    absl::Notification drained;
    ASSERT_TRUE(pool.Schedule([&] { drained.Notify(); }));
    drained.WaitForNotification();
  }
  EXPECT_GT(failed, 0);
}

TEST(StrandTest, ATaskMayOwnTheStrandsOwner) {
  struct Owner {
    Strand strand{NothingIsThrown};
    int runs = 0;
  };
  auto owner = std::make_shared<Owner>();
  const std::weak_ptr<Owner> watch = owner;
  Owner* raw = owner.get();
  raw->strand.Run([owner = std::move(owner)]() mutable {
    Owner& self = *owner;
    ++self.runs;
    self.strand.Run([owner = std::move(owner)] { ++owner->runs; });
  });
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace distgrad
