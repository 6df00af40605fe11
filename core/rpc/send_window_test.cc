// Credit for bytes to send: the order of those that wait, and how they give up.
#include "core/rpc/send_window.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace distgrad {
namespace {

using Credit = SendWindow::Credit;

class SendWindowTest : public ::testing::Test {
 protected:
  // Notes in what order waiters get their credit, and keeps it.
  uint64_t Wait(uint64_t bytes, int name) {
    return window_->AcquireAsync(bytes, [this, name](absl::StatusOr<Credit> credit) {
      (credit.ok() ? served_ : refused_).push_back(name);
      if (credit.ok()) credits_.push_back(*std::move(credit));
    });
  }

  std::shared_ptr<SendWindow> window_ = std::make_shared<SendWindow>(100);
  std::vector<int> served_, refused_;
  std::vector<Credit> credits_;
};

TEST_F(SendWindowTest, CreditIsBoundedAndReleased) {
  std::optional<Credit> first = window_->TryAcquire(60);
  ASSERT_TRUE(first.has_value());
  EXPECT_TRUE(window_->TryAcquire(40).has_value()) << "and is given back at once";
  EXPECT_FALSE(window_->TryAcquire(41).has_value());
  const Credit must = window_->Acquire(1000);
  EXPECT_EQ(window_->acquired(), 1060u);
  first.reset();
  EXPECT_EQ(window_->acquired(), 1000u);
}

TEST_F(SendWindowTest, OneThatIsTooLargeGoesAlone) {
  std::optional<Credit> large = window_->TryAcquire(5000);
  ASSERT_TRUE(large.has_value());
  EXPECT_FALSE(window_->TryAcquire(1).has_value());
}

TEST_F(SendWindowTest, FirstComeFirstServed) {
  std::optional<Credit> all = window_->TryAcquire(100);
  Wait(90, 1);
  Wait(10, 2);
  Wait(20, 3);
  EXPECT_FALSE(window_->TryAcquire(0).has_value()) << "others wait";
  EXPECT_TRUE(served_.empty());
  all.reset();
  EXPECT_EQ(served_, (std::vector<int>{1, 2}));
  Credit first = std::move(credits_[0]);
  first.Release();
  EXPECT_EQ(served_, (std::vector<int>{1, 2, 3}));
}

TEST_F(SendWindowTest, WhoWithdrawsLetsOthersPass) {
  std::optional<Credit> some = window_->TryAcquire(50);
  const uint64_t large = Wait(80, 1);
  Wait(50, 2);
  window_->Withdraw(large, absl::CancelledError("no longer"));
  EXPECT_EQ(refused_, std::vector<int>{1});
  EXPECT_EQ(served_, std::vector<int>{2});
  window_->Withdraw(large, absl::CancelledError("again"));
  EXPECT_EQ(refused_.size(), 1u);
}

TEST_F(SendWindowTest, CloseRefusesWhoWaitsAndWhoComes) {
  std::optional<Credit> all = window_->TryAcquire(100);
  Wait(1, 1);
  window_->Close(absl::UnavailableError("gone"));
  EXPECT_EQ(Wait(1, 2), 0u);
  EXPECT_EQ(refused_, (std::vector<int>{1, 2}));
}

TEST_F(SendWindowTest, TheFirstReasonToCloseStays) {
  window_->Close(absl::UnavailableError("gone"));
  window_->Close(absl::InternalError("later"));
  absl::Status why;
  window_->AcquireAsync(1, [&](const absl::StatusOr<Credit>& credit) { why = credit.status(); });
  EXPECT_EQ(why, absl::UnavailableError("gone"));
}

// Each waiter releases its credit within its callback.
TEST_F(SendWindowTest, AHundredThousandWaitersDoNotDeepenTheStack) {
  std::optional<Credit> all = window_->TryAcquire(100);
  int called = 0;
  for (int i = 0; i < 100000; ++i) {
    window_->AcquireAsync(100, [&](absl::StatusOr<Credit>) { ++called; });
  }
  all.reset();
  EXPECT_EQ(called, 100000);
  EXPECT_EQ(window_->acquired(), 0u);
}

}  // namespace
}  // namespace distgrad
