// A value that arrives later, or the Status that came in its place.
//
//   Promise<int> promise;
//   Future<int> future = promise.future();
//   pool.Schedule([p = std::move(promise)]() mutable { p.Set(7); });
//   absl::StatusOr<int> seven = future.Wait();
//
// Future is a copyable handle; thread-safe. Promise is move-only; a Promise that is
// destroyed before Set() completes its future with kCancelled, so nobody waits for ever.
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
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/blocking.h"
#include "core/base/deadline.h"
#include "core/base/event_loop.h"
#include "core/base/exception.h"
#include "core/base/sleepers.h"
#include "core/base/spin.h"

namespace distgrad {

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

// Says whom the calling thread waits for.
class Awaiting {
 public:
  explicit Awaiting(const void* maker)
      : before_(std::exchange(EventLoop::AwaitedByThisThread(), maker)) {}
  ~Awaiting() { EventLoop::AwaitedByThisThread() = before_; }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  const void* const before_;
};

// What a promise and its futures share. Thread-safe.
template <typename T>
class FutureState {
 public:
  bool Set(absl::StatusOr<T> value) {
    std::vector<absl::AnyInvocable<void(const absl::StatusOr<T>&)>> callbacks;
    std::shared_ptr<EventLoop> borrower;
    {
      absl::MutexLock lock(&mu_);
      if (value_.has_value()) return false;
      value_.emplace(std::move(value));
      callbacks.swap(callbacks_);
      borrower.swap(borrower_);
      sleepers_.WakeAll();
      done_.store(true, std::memory_order_release);
    }
    if (borrower != nullptr) borrower->WakeBorrowedThread();
    for (auto& callback : callbacks) CallAndLog(kCallback, callback, std::as_const(*this).value());
    return true;
  }

  bool Done() const { return done_.load(std::memory_order_acquire); }

  bool WaitUntil(Deadline deadline) const {
    if (Done()) return true;
    // A past deadline only asks; a pool need not wake a thread for that.
    if (deadline.Passed()) return false;
    BlockingScope blocking;
    // A thread that can bring the value itself does so, rather than wait for one that would.
    const void* maker = nullptr;
    std::shared_ptr<EventLoop> loop;
    const bool is_last = IsLastAskedFor(&maker, &loop);
    const Awaiting awaiting(maker);
    std::unique_ptr<EventLoop::BorrowedThread> borrowed;
    const auto borrow = [&] {
      if (borrowed == nullptr && loop != nullptr) borrowed = loop->BorrowThread();
      return borrowed != nullptr;
    };
    // Where other things come the answer may be next.
    const auto poll = [&] { return borrow() && borrowed->PollOnce() && !deadline.Passed(); };
    // What threads wait for is often the answer to a small call, and there at once.
    do {
      const bool is_alone = is_last && (loop == nullptr || borrow());
      const auto patience = is_alone ? Spin::kLongPatience : Spin::kPatience;
      if (Spin::OfThisThread().Await([this] { return Done(); }, patience, poll)) return true;
    } while (!deadline.Passed() && borrow() && SleepInLoop(loop, *borrowed, deadline));
    borrowed = nullptr;
    absl::MutexLock lock(&mu_);
    const absl::Condition has_value(this, &FutureState::HasValue);
    if (!deadline.is_never()) return sleepers_.Await(&mu_, has_value, deadline);
    mu_.Await(has_value);
    return true;
  }

  void MadeBy(std::weak_ptr<Canceller> maker, uint64_t work, std::weak_ptr<EventLoop> loop) {
    absl::MutexLock lock(&mu_);
    canceller_ = std::move(maker);
    work_ = work;
    loop_ = std::move(loop);
    asked_ = ++EventLoop::AskedByThisThread();
  }

  void Cancel() {
    std::shared_ptr<Canceller> maker;
    uint64_t work = 0;
    {
      absl::MutexLock lock(&mu_);
      if (value_.has_value()) return;
      maker = canceller_.lock();
      work = work_;
    }
    if (maker != nullptr) maker->Cancel(work);
  }

  // Only once done: the value does not change any more.
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
    CallAndLog(kCallback, callback, value());
  }

 private:
  static constexpr absl::string_view kCallback = "the callback of a future";

  bool HasValue() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return value_.has_value(); }

  // Until something comes, the value among it. False where the loop does not borrow this thread any
  // more.
  bool SleepInLoop(const std::shared_ptr<EventLoop>& loop, EventLoop::BorrowedThread& borrowed,
                   Deadline deadline) const {
    {
      absl::MutexLock lock(&mu_);
      if (value_.has_value()) return true;
      borrower_ = loop;
    }
    const bool stays = borrowed.Sleep(deadline);
    absl::MutexLock lock(&mu_);
    borrower_ = nullptr;
    return stays;
  }

  // Who makes the value, and the loop that brings it. A thread that has asked for more since will
  // ask for more again: it leaves the loop to others, who bring the answers meanwhile.
  bool IsLastAskedFor(const void** maker, std::shared_ptr<EventLoop>* loop) const {
    std::shared_ptr<Canceller> canceller;  // it may end here, and then outside the lock
    absl::MutexLock lock(&mu_);
    if (asked_ != EventLoop::AskedByThisThread()) return false;
    canceller = canceller_.lock();
    *maker = canceller.get();
    *loop = loop_.lock();
    return true;
  }

  std::atomic<bool> done_{false};  // whether there is a value, for those who do not hold mu_

  mutable absl::Mutex mu_;
  std::optional<absl::StatusOr<T>> value_ ABSL_GUARDED_BY(mu_);
  std::weak_ptr<Canceller> canceller_ ABSL_GUARDED_BY(mu_);
  uint64_t work_ ABSL_GUARDED_BY(mu_) = 0;
  std::weak_ptr<EventLoop> loop_ ABSL_GUARDED_BY(mu_);
  uint64_t asked_ ABSL_GUARDED_BY(mu_) = 0;
  mutable std::shared_ptr<EventLoop> borrower_ ABSL_GUARDED_BY(mu_);  // while the thread sleeps
  mutable Sleepers sleepers_ ABSL_GUARDED_BY(mu_);                    // who waits until a deadline
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

  // Asks whoever makes the value to stop; the future is then done, with kCancelled if nothing came
  // first. No effect where it is done, or its maker has no way to stop.
  void Cancel() const {
    const auto state = state_;  // what that completes may drop this handle
    state->Cancel();
  }
  // For the maker, on the thread that asks for the value: how Cancel() reaches it (null: not at
  // all), and which loop will bring it (null: none will). A thread that waits for the value may do
  // that loop's work, and the maker's.
  void MadeBy(std::weak_ptr<Canceller> maker, uint64_t work, std::weak_ptr<EventLoop> loop) const {
    state_->MadeBy(std::move(maker), work, std::move(loop));
  }

 private:
  std::shared_ptr<internal::FutureState<T>> state_;
};

template <typename T>
class Promise {
 public:
  Promise() : state_(std::make_shared<internal::FutureState<T>>()) {}
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
    const auto state = state_;  // whoever waits may destroy this promise as soon as it wakes
    return state->Set(std::move(value));
  }

 private:
  void Abandon() {
    if (state_) state_->Set(absl::CancelledError("the work was dropped before it completed"));
  }

  std::shared_ptr<internal::FutureState<T>> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_FUTURE_H_
