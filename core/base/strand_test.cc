#include "core/base/strand.h"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(StrandTest, AnIdleStrandRunsAtOnceOnTheCaller) {
  Strand strand;
  std::thread::id ran;
  strand.Run([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(StrandTest, ATaskOfATaskRunsAfterIt) {
  Strand strand;
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
  Strand strand;
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
  Strand strand;
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
  Strand strand;
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  bool gone = false;
  strand.Run([&, owned = std::move(owned)] { strand.Run([&] { gone = watch.expired(); }); });
  EXPECT_TRUE(gone);
}

TEST(StrandTest, ATaskMayOwnTheStrandsOwner) {
  struct Owner {
    Strand strand;
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
