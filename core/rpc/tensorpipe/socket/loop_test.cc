#include "core/rpc/tensorpipe/socket/loop.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

namespace distgrad {
namespace {

class LoopTest : public testing::Test {
 protected:
  void SetUp() override {
    auto loop = Loop::Start("loop-test");
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }

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
