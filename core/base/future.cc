// Waits for the value of a future: polls for a moment, lends the thread to the loop that brings the
// value, and sleeps.
#include "core/base/future.h"

#include "core/base/blocking.h"
#include "core/base/event_loop.h"
#include "core/base/exception.h"
#include "core/base/spin.h"

namespace distgrad::internal {

const absl::Status& DroppedStatus() {
  static const absl::Status* const dropped =
      new absl::Status(absl::CancelledError("the work was dropped before it completed"));
  return *dropped;
}

bool FutureWait::Wait(Deadline deadline) const {
  // A past deadline only asks; a pool need not wake a thread for that.
  if (deadline.Passed()) return false;
  BlockingScope blocking;
  // A thread that can bring the value itself does so, rather than wait for one that would.
  const void* maker = nullptr;
  std::shared_ptr<EventLoop> loop;
  const bool is_last = IsLastAskedFor(&maker, &loop);
  const EventLoop::Awaiting awaiting(maker);
  std::unique_ptr<EventLoop::BorrowedThread> borrowed;
  const auto borrow = [&] {
    if (borrowed == nullptr && loop != nullptr) borrowed = loop->BorrowThread();
    return borrowed != nullptr;
  };
  // Where other things come the answer may be next.
  const auto poll = [&] { return borrow() && borrowed->PollOnce() && !deadline.Passed(); };
  // Sleeps until something comes, the value among it. Returns false where the loop does not borrow
  // this thread any more.
  const auto sleep_in_loop = [&] {
    {
      absl::MutexLock lock(&mu_);
      if (HasValue()) return true;
      borrower_ = loop;
    }
    const bool stays = borrowed->Sleep(deadline);
    absl::MutexLock lock(&mu_);
    borrower_ = nullptr;
    return stays;
  };
  // What threads wait for is often the answer to a small call, and there at once.
  do {
    const bool is_alone = is_last && (loop == nullptr || borrow());
    const auto patience = is_alone ? Spin::kLongPatience : Spin::kPatience;
    if (Spin::OfThisThread().Await([this] { return Done(); }, patience, poll)) return true;
  } while (!deadline.Passed() && borrow() && sleep_in_loop());
  borrowed = nullptr;
  absl::MutexLock lock(&mu_);
  const absl::Condition has_value(this, &FutureWait::HasValue);
  if (!deadline.is_never()) return sleepers_.Await(&mu_, has_value, deadline);
  mu_.Await(has_value);
  return true;
}

void FutureWait::MadeBy(std::weak_ptr<Canceller> maker, uint64_t work,
                        std::weak_ptr<EventLoop> loop) {
  absl::MutexLock lock(&mu_);
  canceller_ = std::move(maker);
  work_ = work;
  loop_ = std::move(loop);
  asked_ = ++EventLoop::AskedByThisThread();
}

void FutureWait::Cancel() {
  std::shared_ptr<Canceller> maker;
  uint64_t work = 0;
  {
    absl::MutexLock lock(&mu_);
    if (HasValue()) return;
    maker = canceller_.lock();
    work = work_;
  }
  if (maker != nullptr) maker->Cancel(work);
}

std::shared_ptr<EventLoop> FutureWait::SetDone() {
  sleepers_.WakeAll();
  done_.store(true, std::memory_order_release);
  return std::exchange(borrower_, nullptr);
}

void FutureWait::WakeBorrowedThread(EventLoop& loop) { loop.WakeBorrowedThread(); }

void FutureWait::Run(absl::FunctionRef<void()> callback) {
  CallAndLog("the callback of a future", callback);
}

// A thread that has asked for more since will ask for more again: it leaves the loop to others, who
// bring the answers meanwhile.
bool FutureWait::IsLastAskedFor(const void** maker, std::shared_ptr<EventLoop>* loop) const {
  std::shared_ptr<Canceller> canceller;  // it may end here, and then outside the lock
  absl::MutexLock lock(&mu_);
  if (asked_ != EventLoop::AskedByThisThread()) return false;
  canceller = canceller_.lock();
  *maker = canceller.get();
  *loop = loop_.lock();
  return true;
}

}  // namespace distgrad::internal
