// A value that arrives later, or the Status that came in its place.
//
//   Promise<int> promise;
//   Future<int> future = promise.future();
//   pool.Schedule([p = std::move(promise)]() mutable { p.Set(7); });
//   absl::StatusOr<int> seven = future.Wait();
//
// Future is a copyable handle; thread-safe. Promise is move-only; a Promise that is
// destroyed before Set() completes its future with kCancelled, so no thread waits for ever.
//
// The maker of the value may let it be cancelled: see Canceller.
#ifndef DISTGRAD_CORE_BASE_FUTURE_H_
#define DISTGRAD_CORE_BASE_FUTURE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/base/deadline.h"
#include "core/base/sleepers.h"

namespace distgrad {

class EventLoop;  // core/base/event_loop.h

// The value of work that has no result.
struct Unit {};

// Makes values that can be cancelled, and knows each by a number. Thread-safe.
class Canceller {
 public:
  virtual ~Canceller() = default;
  // Ends the work, if it has not ended, and with it the future. Must not block.
  virtual void Cancel(uint64_t work) = 0;
};

namespace internal {

// What a future says whose promise was dropped. Made with the first promise, for whoever drops one
// may have no memory left.
const absl::Status& DroppedStatus();

// The state that a promise and its futures share, but for the value: whether there is one, the
// threads that wait for it, and its maker. Thread-safe.
class FutureWait {
 public:
  FutureWait(const FutureWait&) = delete;
  FutureWait& operator=(const FutureWait&) = delete;

  bool Done() const { return done_.load(std::memory_order_acquire); }
  // Waits until `deadline` at most; returns whether it is done.
  bool WaitUntil(Deadline deadline) const { return Done() || Wait(deadline); }

  void MadeBy(std::weak_ptr<Canceller> maker, uint64_t work, std::weak_ptr<EventLoop> loop);
  void Cancel();

 protected:
  FutureWait() = default;
  ~FutureWait() = default;

  // Makes it done, and wakes the threads that sleep. Returns the loop whose borrowed thread has to
  // be woken once the lock is free; null for none.
  std::shared_ptr<EventLoop> SetDone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void WakeBorrowedThread(EventLoop& loop);
  // Calls a user's callback, and logs what it throws.
  static void Run(absl::FunctionRef<void()> callback);

  mutable absl::Mutex mu_;

 private:
  bool Wait(Deadline deadline) const;
  bool HasValue() const { return done_.load(std::memory_order_relaxed); }
  // Returns false if this thread has asked for more since. Else stores the maker of the value, and
  // the loop that brings it.
  bool IsLastAskedFor(const void** maker, std::shared_ptr<EventLoop>* loop) const;

  std::atomic<bool> done_{false};  // written under mu_
  std::weak_ptr<Canceller> canceller_ ABSL_GUARDED_BY(mu_);
  uint64_t work_ ABSL_GUARDED_BY(mu_) = 0;
  std::weak_ptr<EventLoop> loop_ ABSL_GUARDED_BY(mu_);
  uint64_t asked_ ABSL_GUARDED_BY(mu_) = 0;
  mutable std::shared_ptr<EventLoop> borrower_ ABSL_GUARDED_BY(mu_);  // while the thread sleeps
  mutable Sleepers sleepers_ ABSL_GUARDED_BY(mu_);                    // threads with a deadline
};

// What a promise and its futures share. Thread-safe.
template <typename T>
class FutureState : public FutureWait {
 public:
  bool Set(absl::StatusOr<T> value) {
    std::vector<absl::AnyInvocable<void(const absl::StatusOr<T>&)>> callbacks;
    std::shared_ptr<EventLoop> borrower;
    {
      absl::MutexLock lock(&mu_);
      if (value_.has_value()) return false;
      value_.emplace(std::move(value));
      callbacks.swap(callbacks_);
      borrower = SetDone();
    }
    if (borrower != nullptr) WakeBorrowedThread(*borrower);
    for (auto& callback : callbacks) {
      Run([&] { callback(std::as_const(*this).value()); });
    }
    return true;
  }

  // Called only once done: the value does not change any more.
  const absl::StatusOr<T>& value() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return *value_; }
  absl::StatusOr<T>& value() ABSL_NO_THREAD_SAFETY_ANALYSIS { return *value_; }

  void Then(absl::AnyInvocable<void(const absl::StatusOr<T>&)> callback) {
    {
      absl::MutexLock lock(&mu_);
      if (!value_.has_value()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    Run([&] { callback(std::as_const(*this).value()); });
  }

 private:
  std::optional<absl::StatusOr<T>> value_ ABSL_GUARDED_BY(mu_);
  std::vector<absl::AnyInvocable<void(const absl::StatusOr<T>&)>> callbacks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace internal

template <typename T>
class Future {
 public:
  // Never completes by itself; assign a real one over it.
  Future() = default;
  explicit Future(std::shared_ptr<internal::FutureState<T>> state) : state_(std::move(state)) {}

  // A future that is done already.
  static Future Of(absl::StatusOr<T> value) {
    auto state = std::make_shared<internal::FutureState<T>>();
    state->Set(std::move(value));
    return Future(std::move(state));
  }

  bool valid() const { return state_ != nullptr; }
  bool Done() const { return state_->Done(); }

  // Waits. On a pool's thread the pool runs another thread meanwhile.
  const absl::StatusOr<T>& Wait() const {
    state_->WaitUntil(Deadline::Never());
    return std::as_const(*state_).value();
  }

  // Waits until `deadline` at most; returns whether the future is done.
  bool WaitUntil(Deadline deadline) const { return state_->WaitUntil(deadline); }

  // Waits and moves the value out. For the only owner of the result: other handles of this
  // future are left with a moved-from value.
  absl::StatusOr<T> Take() {
    state_->WaitUntil(Deadline::Never());
    return std::move(state_->value());
  }

  // Calls `callback` exactly once: at once if done, else on the thread that completes it. What it
  // throws is logged, and goes no further.
  void Then(absl::AnyInvocable<void(const absl::StatusOr<T>&)> callback) const {
    const auto state = state_;  // the callback may drop this handle
    state->Then(std::move(callback));
  }

  // Asks the maker of the value to stop; the future is then done, with kCancelled if nothing came
  // first. No effect where it is done, or its maker has no way to stop.
  void Cancel() const {
    const auto state = state_;  // what that completes may drop this handle
    state->Cancel();
  }
  // Sets, on the thread that asks for the value, how Cancel() reaches its maker (null: not at all),
  // and which loop will bring it (null: none will). A thread that waits for the value may do that
  // loop's work, and the maker's.
  void MadeBy(std::weak_ptr<Canceller> maker, uint64_t work, std::weak_ptr<EventLoop> loop) const {
    state_->MadeBy(std::move(maker), work, std::move(loop));
  }

 private:
  std::shared_ptr<internal::FutureState<T>> state_;
};

template <typename T>
class Promise {
 public:
  Promise() : state_(std::make_shared<internal::FutureState<T>>()) { internal::DroppedStatus(); }
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    Abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  ~Promise() { Abandon(); }

  Future<T> future() const { return Future<T>(state_); }

  // Completes the future; the first call wins. Returns whether this was it.
  bool Set(absl::StatusOr<T> value) {
    const auto state = state_;  // a waiting thread may destroy this promise as soon as it wakes
    return state->Set(std::move(value));
  }

 private:
  void Abandon() {
    if (state_) state_->Set(internal::DroppedStatus());
  }

  std::shared_ptr<internal::FutureState<T>> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_FUTURE_H_
