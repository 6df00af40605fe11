#include "core/base/cancellation.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace distgrad {
namespace {

TEST(CancellationTest, TellsWhoWatchesOnceAndKeepsTheFirstReason) {
  Cancellation cancellation;
  int told = 0, forgotten = 0;
  EXPECT_NE(cancellation.OnCancel([&] { ++told; }), 0u);
  cancellation.Forget(cancellation.OnCancel([&] { ++forgotten; }));
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
  cancellation.OnCancel([&] { cancellation.Forget(second); });
  second = cancellation.OnCancel([] {});
  cancellation.Cancel(absl::CancelledError("now"));
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
