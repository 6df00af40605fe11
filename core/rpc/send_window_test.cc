#include "core/rpc/send_window.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace distgrad {
namespace {

using Room = SendWindow::Room;

class SendWindowTest : public ::testing::Test {
 protected:
  // Notes in what order waiters get their room, and keeps it.
  uint64_t Wait(uint64_t bytes, int name) {
    return window_->TakeLater(bytes, [this, name](absl::StatusOr<Room> room) {
      (room.ok() ? served_ : refused_).push_back(name);
      if (room.ok()) rooms_.push_back(*std::move(room));
    });
  }

  std::shared_ptr<SendWindow> window_ = std::make_shared<SendWindow>(100);
  std::vector<int> served_, refused_;
  std::vector<Room> rooms_;
};

TEST_F(SendWindowTest, RoomIsBoundedAndGivenBack) {
  std::optional<Room> first = window_->TryTake(60);
  ASSERT_TRUE(first.has_value());
  EXPECT_TRUE(window_->TryTake(40).has_value()) << "and is given back at once";
  EXPECT_FALSE(window_->TryTake(41).has_value());
  const Room must = window_->Take(1000);
  EXPECT_EQ(window_->taken(), 1060u);
  first.reset();
  EXPECT_EQ(window_->taken(), 1000u);
}

TEST_F(SendWindowTest, OneThatIsTooLargeGoesAlone) {
  std::optional<Room> large = window_->TryTake(5000);
  ASSERT_TRUE(large.has_value());
  EXPECT_FALSE(window_->TryTake(1).has_value());
}

TEST_F(SendWindowTest, FirstComeFirstServed) {
  std::optional<Room> all = window_->TryTake(100);
  Wait(90, 1);
  Wait(10, 2);
  Wait(20, 3);
  EXPECT_FALSE(window_->TryTake(0).has_value()) << "others wait";
  EXPECT_TRUE(served_.empty());
  all.reset();
  EXPECT_EQ(served_, (std::vector<int>{1, 2}));
  Room first = std::move(rooms_[0]);
  first.GiveBack();
  EXPECT_EQ(served_, (std::vector<int>{1, 2, 3}));
}

TEST_F(SendWindowTest, WhoWithdrawsLetsOthersPass) {
  std::optional<Room> some = window_->TryTake(50);
  const uint64_t large = Wait(80, 1);
  Wait(50, 2);
  window_->Withdraw(large, absl::CancelledError("no longer"));
  EXPECT_EQ(refused_, std::vector<int>{1});
  EXPECT_EQ(served_, std::vector<int>{2});
  window_->Withdraw(large, absl::CancelledError("again"));
  EXPECT_EQ(refused_.size(), 1u);
}

TEST_F(SendWindowTest, CloseRefusesWhoWaitsAndWhoComes) {
  std::optional<Room> all = window_->TryTake(100);
  Wait(1, 1);
  window_->Close(absl::UnavailableError("gone"));
  EXPECT_EQ(Wait(1, 2), 0u);
  EXPECT_EQ(refused_, (std::vector<int>{1, 2}));
}

// Each waiter gives its room back within its callback.
TEST_F(SendWindowTest, AHundredThousandWaitersDoNotDeepenTheStack) {
  std::optional<Room> all = window_->TryTake(100);
  int called = 0;
  for (int i = 0; i < 100000; ++i) {
    window_->TakeLater(100, [&](absl::StatusOr<Room>) { ++called; });
  }
  all.reset();
  EXPECT_EQ(called, 100000);
  EXPECT_EQ(window_->taken(), 0u);
}

}  // namespace
}  // namespace distgrad
