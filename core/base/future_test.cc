// Setting, waiting, cancelling and dropping, and waits that borrow the thread for a loop or a pool.
#include "core/base/future.h"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "core/base/event_loop.h"
#include "core/base/thread_pool.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(FutureTest, SetThenWait) {
  Promise<int> promise;
  Future<int> future = promise.future();
  EXPECT_FALSE(future.Done());
  EXPECT_TRUE(promise.Set(7));
  EXPECT_TRUE(future.Done());
  EXPECT_EQ(future.Wait().value(), 7);
}

TEST(FutureTest, WaitThenSet) {
  Promise<std::string> promise;
  Future<std::string> future = promise.future();
  std::thread setter([&] { promise.Set(std::string("late")); });
  EXPECT_EQ(future.Wait().value(), "late");
  setter.join();
}

TEST(FutureTest, TheFirstSetWins) {
  Promise<int> promise;
  EXPECT_TRUE(promise.Set(absl::AbortedError("first")));
  EXPECT_FALSE(promise.Set(2));
  EXPECT_EQ(promise.future().Wait().status(), absl::AbortedError("first"));
}

TEST(FutureTest, ADroppedPromiseCancels) {
  Future<Unit> future;
  EXPECT_FALSE(future.valid());
  {
    Promise<Unit> promise;
    future = promise.future();
    EXPECT_TRUE(future.valid());
  }
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST(FutureTest, AMovedPromiseDoesNotCancel) {
  Promise<int> promise;
  Future<int> future = promise.future();
  {
    Promise<int> moved = std::move(promise);
    EXPECT_FALSE(future.Done());
    promise = std::move(moved);
  }
  EXPECT_FALSE(future.Done());
  promise.Set(1);
  EXPECT_EQ(*future.Wait(), 1);
}

TEST(FutureTest, AssigningOverAPromiseCancelsTheOldOne) {
  Promise<int> promise;
  Future<int> old = promise.future();
  promise = Promise<int>();
  EXPECT_EQ(old.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(promise.future().Done());
}

TEST(FutureTest, ThenBeforeAndAfter) {
  Promise<int> promise;
  Future<int> future = promise.future();
  std::vector<int> seen;
  future.Then([&](const absl::StatusOr<int>& value) { seen.push_back(*value); });
  future.Then([&](const absl::StatusOr<int>& value) { seen.push_back(*value + 1); });
  EXPECT_TRUE(seen.empty());
  promise.Set(10);
  EXPECT_EQ(seen, (std::vector<int>{10, 11}));
  future.Then([&](const absl::StatusOr<int>& value) { seen.push_back(*value + 2); });
  EXPECT_EQ(seen, (std::vector<int>{10, 11, 12}));
}

// Whoever completes it, a connection, say, has other things to do; and others wait to be told.
TEST(FutureTest, WhatACallbackThrowsReachesNobody) {
  Promise<int> promise;
  const Future<int> future = promise.future();
  std::vector<int> seen;
  future.Then([](const absl::StatusOr<int>&) { throw std::runtime_error("out of luck"); });
  future.Then([&](const absl::StatusOr<int>& value) { seen.push_back(*value); });
  EXPECT_NO_THROW(promise.Set(10));
  EXPECT_EQ(seen, (std::vector<int>{10}));
  EXPECT_NO_THROW(future.Then([](const absl::StatusOr<int>&) { throw 1; }));
}

TEST(FutureTest, ACallbackMayDropPromiseAndFuture) {
  auto promise = std::make_unique<Promise<std::string>>();
  std::optional<Future<std::string>> future = promise->future();
  std::string seen;
  future->Then([&](const absl::StatusOr<std::string>& value) {
    promise = nullptr;
    future.reset();
    seen = *value;
  });
  promise->Set(std::string("still here"));
  EXPECT_EQ(seen, "still here");

  future = Future<std::string>::Of(std::string("done"));
  future->Then([&](const absl::StatusOr<std::string>& value) {
    future.reset();
    seen = *value;
  });
  EXPECT_EQ(seen, "done");
}

TEST(FutureTest, TheWaiterMayDestroyThePromise) {
  for (int i = 0; i < 200; ++i) {
    auto promise = std::make_unique<Promise<int>>();
    Future<int> future = promise->future();
    absl::Notification set;
    std::thread setter([&, raw = promise.get()] {
      raw->Set(1);
      set.Notify();
    });
    future.Wait().IgnoreError();
    set.WaitForNotification();
    promise = nullptr;
    setter.join();
  }
}

TEST(FutureTest, WaitUntilWithAPastDeadlineOnlyAsks) {
  Promise<int> promise;
  EXPECT_FALSE(promise.future().WaitUntil(absl::InfinitePast()));
  EXPECT_FALSE(promise.future().WaitUntil(absl::Now() - absl::Seconds(1)));
  EXPECT_FALSE(promise.future().WaitUntil(absl::Now() + absl::Milliseconds(1)));
  promise.Set(1);
  EXPECT_TRUE(promise.future().WaitUntil(absl::InfinitePast()));
}

TEST(FutureTest, TakeMovesOut) {
  Promise<std::unique_ptr<int>> promise;
  promise.Set(std::make_unique<int>(5));
  EXPECT_EQ(*promise.future().Take().value(), 5);
}

TEST(FutureTest, Of) {
  EXPECT_EQ(*Future<int>::Of(3).Wait(), 3);
  EXPECT_EQ(Future<int>::Of(absl::NotFoundError("x")).Wait().status(), absl::NotFoundError("x"));
}

TEST(FutureTest, WaitingOnAPoolOfOneLetsTheNextTaskRun) {
  ThreadPool pool("p", 1);
  Promise<int> outer;
  Future<int> result = outer.future();
  pool.Schedule([&pool, outer = std::move(outer)]() mutable {
    Promise<int> inner;
    Future<int> value = inner.future();
    pool.Schedule([inner = std::move(inner)]() mutable { inner.Set(20); });
    outer.Set(*value.Wait() + 1);
  });
  EXPECT_EQ(*result.Wait(), 21);
}

// The thread that it borrows does what there is to do.
class BorrowingLoop : public EventLoop {
 public:
  void Run(absl::AnyInvocable<void()> task) override {
    absl::MutexLock lock(&mu_);
    tasks_.push_back(std::move(task));
  }
  std::unique_ptr<EventLoop::BorrowedThread> BorrowThread() override {
    return std::make_unique<BorrowedThread>(this);
  }
  void WakeBorrowedThread() override {
    absl::MutexLock lock(&mu_);
    woken_ = true;
  }
  // Until a borrowed thread sleeps.
  void AwaitSleeper() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&sleeps_));
  }

 private:
  class BorrowedThread : public EventLoop::BorrowedThread {
   public:
    explicit BorrowedThread(BorrowingLoop* loop) : loop_(loop) {}
    bool PollOnce() override {
      std::vector<absl::AnyInvocable<void()>> tasks;
      {
        absl::MutexLock lock(&loop_->mu_);
        tasks.swap(loop_->tasks_);
      }
      for (auto& task : tasks) task();
      return !tasks.empty();
    }
    bool Sleep(Deadline deadline) override {
      {
        absl::MutexLock lock(&loop_->mu_);
        loop_->sleeps_ = true;
        loop_->mu_.AwaitWithTimeout(absl::Condition(loop_, &BorrowingLoop::HasWork),
                                    deadline.Left());
      }
      PollOnce();
      return true;
    }

   private:
    BorrowingLoop* const loop_;
  };

  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return woken_ || !tasks_.empty(); }

  absl::Mutex mu_;
  std::vector<absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool sleeps_ ABSL_GUARDED_BY(mu_) = false;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
};

TEST(FutureTest, WhoWaitsDoesWhatBringsTheValue) {
  const auto loop = std::make_shared<BorrowingLoop>();
  Promise<std::thread::id> promise;
  const Future<std::thread::id> future = promise.future();
  future.MadeBy({}, 0, loop);
  loop->Run([&] { promise.Set(std::this_thread::get_id()); });
  EXPECT_EQ(*future.Wait(), std::this_thread::get_id());
}

TEST(FutureTest, WhoWaitsSaysForWhom) {
  struct Maker : Canceller {
    void Cancel(uint64_t) override {}
  };
  const auto maker = std::make_shared<Maker>();
  const auto loop = std::make_shared<BorrowingLoop>();
  Promise<bool> promise;
  const Future<bool> future = promise.future();
  future.MadeBy(maker, 0, loop);
  loop->Run([&] {
    const Canceller* const made_by = maker.get();
    promise.Set(EventLoop::AwaitedByThisThread() == made_by);
  });
  EXPECT_TRUE(*future.Wait());
  EXPECT_EQ(EventLoop::AwaitedByThisThread(), nullptr);
}

TEST(FutureTest, WhoSleepsAtALoopIsWokenByAValueFromElsewhere) {
  const auto loop = std::make_shared<BorrowingLoop>();
  Promise<int> promise;
  const Future<int> future = promise.future();
  future.MadeBy({}, 0, loop);
  std::thread other([&] {
    loop->AwaitSleeper();
    promise.Set(3);
  });
  EXPECT_EQ(*future.Wait(), 3);
  other.join();
}

TEST(FutureTest, TheDeadlineOfWhoSleepsAtALoop) {
  const auto loop = std::make_shared<BorrowingLoop>();
  Promise<int> promise;
  promise.future().MadeBy({}, 0, loop);
  EXPECT_FALSE(promise.future().WaitUntil(absl::Now() + absl::Milliseconds(1)));
}

TEST(FutureTest, WhoHasAskedForMoreLeavesTheLoopToOthers) {
  const auto loop = std::make_shared<BorrowingLoop>();
  Promise<int> first, second;
  const Future<int> future = first.future();
  future.MadeBy({}, 0, loop);
  second.future().MadeBy({}, 0, loop);
  loop->Run([&] { first.Set(1); });
  EXPECT_FALSE(future.WaitUntil(absl::Now() + absl::Milliseconds(1)));
  loop->BorrowThread()->PollOnce();
  EXPECT_EQ(*future.Wait(), 1);
}

TEST(FutureTest, CancelReachesTheMakerUntilItIsDone) {
  struct Maker : Canceller {
    Promise<int> promise;
    int asked = 0;
    void Cancel(uint64_t work) override {
      EXPECT_EQ(work, 7u);
      ++asked;
      promise.Set(absl::CancelledError("as was asked"));
    }
  };
  auto maker = std::make_shared<Maker>();
  const Future<int> future = maker->promise.future();
  future.Cancel();  // nobody is there to be asked
  EXPECT_FALSE(future.Done());
  future.MadeBy(maker, 7, {});
  future.Cancel();
  EXPECT_EQ(future.Wait().status(), absl::CancelledError("as was asked"));
  future.Cancel();
  EXPECT_EQ(maker->asked, 1);
  Future<int>::Of(3).Cancel();
}

TEST(FutureTest, APoolThatRefusesCancels) {
  ThreadPool pool("p", 1);
  pool.Close();
  Promise<int> promise;
  Future<int> future = promise.future();
  pool.Schedule([promise = std::move(promise)]() mutable { promise.Set(1); });
  EXPECT_EQ(future.Wait().status().code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace distgrad
