// How long a thread polls before it sleeps, and when it leaves that out.
#include "core/base/spin.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace distgrad {
namespace {

// How often a wait for what never comes looks for it.
int LooksInVain(Spin& spin) {
  int looks = 0;
  EXPECT_FALSE(spin.Await(
      [&] {
        ++looks;
        return false;
      },
      Spin::kPatience));
  return looks;
}

TEST(SpinTest, WhatIsThereIsSeenAtTheFirstLook) {
  Spin spin;
  int looks = 0;
  EXPECT_TRUE(spin.Await([&] { return ++looks == 1; }, Spin::kPatience));
  EXPECT_EQ(looks, 1);
}

TEST(SpinTest, EachWaitInVainLeavesOutTwiceAsMany) {
  if (Spin::Alone()) GTEST_SKIP() << "one processor: there is no spinning";
  Spin spin;
  // No more than 1,023, so that a thread whose events come at once again soon notices.
  for (int left_out : {1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 1023}) {
    EXPECT_GT(LooksInVain(spin), 1);
    for (int i = 0; i < left_out; ++i) EXPECT_EQ(LooksInVain(spin), 1) << i << " of " << left_out;
  }
  EXPECT_GT(LooksInVain(spin), 1);
}

TEST(SpinTest, WhereOtherThingsComeItGoesOnLooking) {
  if (Spin::Alone()) GTEST_SKIP() << "one processor: there is no spinning";
  Spin spin;
  const auto begin = std::chrono::steady_clock::now();
  bool late = false;
  const auto look = [&] {
    late = std::chrono::steady_clock::now() - begin > 3 * Spin::kPatience;
    return true;
  };
  EXPECT_TRUE(spin.Await([&] { return late; }, Spin::kPatience, look));
}

TEST(SpinTest, SuccessForgetsWhatWasInVain) {
  if (Spin::Alone()) GTEST_SKIP() << "one processor: there is no spinning";
  Spin spin;
  EXPECT_GT(LooksInVain(spin), 1);
  EXPECT_EQ(LooksInVain(spin), 1);
  int looks = 0;
  ASSERT_TRUE(spin.Await([&] { return ++looks == 2; }, Spin::kPatience));
  EXPECT_GT(LooksInVain(spin), 1);
  EXPECT_EQ(LooksInVain(spin), 1);
  EXPECT_GT(LooksInVain(spin), 1);
}

}  // namespace
}  // namespace distgrad
