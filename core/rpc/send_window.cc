#include "core/rpc/send_window.h"

#include <algorithm>

namespace distgrad {

uint64_t SendWindow::taken() const {
  absl::MutexLock lock(&mu_);
  return taken_;
}

std::optional<SendWindow::Room> SendWindow::TryTake(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (!waiting_.empty() || !Fits(bytes)) return std::nullopt;
  taken_ += bytes;
  return Room(shared_from_this(), bytes);
}

SendWindow::Room SendWindow::Take(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  taken_ += bytes;
  return Room(shared_from_this(), bytes);
}

uint64_t SendWindow::TakeLater(uint64_t bytes, Callback callback) {
  absl::Status closed;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    if (closed.ok()) {
      if (!waiting_.empty() || !Fits(bytes)) {
        waiting_.push_back({++last_, bytes, std::move(callback)});
        return last_;
      }
      taken_ += bytes;
    }
  }
  if (closed.ok()) {
    callback(Room(shared_from_this(), bytes));
  } else {
    callback(closed);
  }
  return 0;
}

void SendWindow::Withdraw(uint64_t number, const absl::Status& why) {
  Callback callback;
  {
    absl::MutexLock lock(&mu_);
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Waiter& waiter) { return waiter.number == number; });
    if (found == waiting_.end()) return;
    callback = std::move(found->callback);
    waiting_.erase(found);
  }
  callback(why);
  GiveBack(0);  // it may have stood before one that fits
}

void SendWindow::Close(const absl::Status& why) {
  std::deque<Waiter> waiting;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return;
    closed_ = why;
    waiting.swap(waiting_);
  }
  for (Waiter& waiter : waiting) waiter.callback(why);
}

void SendWindow::GiveBack(uint64_t bytes) {
  const auto self = shared_from_this();  // a callback may drop the last other owner
  {
    absl::MutexLock lock(&mu_);
    taken_ -= bytes;
    // What a waiter sends may be gone before its callback returns, which comes here again: the one
    // loop goes on, rather than a call within a call within a call.
    if (granting_) return;
    granting_ = true;
  }
  for (;;) {
    Waiter next;
    {
      absl::MutexLock lock(&mu_);
      if (waiting_.empty() || !Fits(waiting_.front().bytes)) {
        granting_ = false;
        return;
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
      taken_ += next.bytes;
    }
    next.callback(Room(self, next.bytes));
  }
}

}  // namespace distgrad
