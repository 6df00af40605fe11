// Who is told of a cancellation, how often, and what forgetting a callback waits for.
#include "core/base/cancellation.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"

namespace distgrad {
namespace {

TEST(CancellationTest, TellsWhoWatchesOnceAndKeepsTheFirstReason) {
  Cancellation cancellation;
  int told = 0, forgotten = 0;
  EXPECT_NE(cancellation.OnCancel([&] { ++told; }), 0u);
  cancellation.ForgetWithoutWaiting(cancellation.OnCancel([&] { ++forgotten; }));
  EXPECT_FALSE(cancellation.cancelled());
  EXPECT_TRUE(cancellation.why().ok());
  cancellation.Cancel(absl::CancelledError("first"));
  cancellation.Cancel(absl::AbortedError("second"));
  EXPECT_TRUE(cancellation.cancelled());
  EXPECT_EQ(cancellation.why(), absl::CancelledError("first"));
  EXPECT_EQ(told, 1);
  EXPECT_EQ(forgotten, 0);
  EXPECT_EQ(cancellation.OnCancel([&] { ++told; }), 0u);
  EXPECT_EQ(told, 2) << "at once, for it is cancelled";
}

TEST(CancellationTest, WhatACallbackThrowsReachesNobody) {
  Cancellation cancellation;
  int told = 0;
  cancellation.OnCancel([] { throw std::runtime_error("out of luck"); });
  cancellation.OnCancel([&] { ++told; });
  EXPECT_NO_THROW(cancellation.Cancel(absl::CancelledError("now")));
  EXPECT_EQ(told, 1);
  EXPECT_NO_THROW(cancellation.OnCancel([] { throw 1; }));
}

TEST(CancellationTest, ACallbackMayForgetAnother) {
  Cancellation cancellation;
  uint64_t second = 0;
  cancellation.OnCancel([&] { cancellation.ForgetWithoutWaiting(second); });
  second = cancellation.OnCancel([] {});
  cancellation.Cancel(absl::CancelledError("now"));
}

TEST(CancellationTest, OneForgottenByAnotherIsNotCalled) {
  Cancellation cancellation;
  std::vector<int> told;
  uint64_t second = 0, third = 0;
  cancellation.OnCancel([&] {
    told.push_back(1);
    cancellation.ForgetWithoutWaiting(second);
    cancellation.Forget(third);
  });
  second = cancellation.OnCancel([&] { told.push_back(2); });
  third = cancellation.OnCancel([&] { told.push_back(3); });
  cancellation.OnCancel([&] { told.push_back(4); });
  cancellation.Cancel(absl::CancelledError("now"));
  EXPECT_EQ(told, (std::vector<int>{1, 4})) << "in their order";
}

TEST(CancellationTest, OneThatRunsElsewhereIsWaitedFor) {
  Cancellation cancellation;
  absl::Notification entered, release, forgotten;
  bool over = false;  // without a lock: what is waited for has happened before
  uint64_t own = 0;
  const uint64_t watch = cancellation.OnCancel([&] {
    cancellation.Forget(own);  // does not wait for itself
    entered.Notify();
    release.WaitForNotification();
    over = true;
  });
  own = watch;
  std::thread cancels([&] { cancellation.Cancel(absl::CancelledError("now")); });
  entered.WaitForNotification();
  cancellation.ForgetWithoutWaiting(watch);  // does not wait
  std::thread forgets([&] {
    cancellation.Forget(watch);
    EXPECT_TRUE(over);
    forgotten.Notify();
  });
  EXPECT_FALSE(forgotten.HasBeenNotified());
  release.Notify();
  forgets.join();
  cancels.join();
  cancellation.Forget(watch);  // long over
  cancellation.Forget(0);
}

TEST(CancellationTest, WhatACallbackHoldsEndsBeforeItIsForgotten) {
  struct Held {
    ~Held() {
      entered->Notify();
      release->WaitForNotification();
      *over = true;
    }
    absl::Notification *entered, *release;
    bool* over;
  };
  Cancellation cancellation;
  absl::Notification entered, release;
  bool over = false;
  std::shared_ptr<Held> held(new Held{&entered, &release, &over});
  const uint64_t watch = cancellation.OnCancel([held = std::move(held)] {});
  std::thread cancels([&] { cancellation.Cancel(absl::CancelledError("now")); });
  entered.WaitForNotification();
  std::thread releases([&] { release.Notify(); });
  cancellation.Forget(watch);
  EXPECT_TRUE(over);
  releases.join();
  cancels.join();
}

TEST(CancellationTest, FromManyThreads) {
  for (int round = 0; round < 50; ++round) {
    Cancellation cancellation;
    std::atomic<int> told{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        cancellation.OnCancel([&] { ++told; });
        cancellation.Cancel(absl::CancelledError("one of four"));
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(told, 4);
  }
}

}  // namespace
}  // namespace distgrad
