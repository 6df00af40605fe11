// Grants credit in the order of requests, with no lock held while it calls.
#include "core/rpc/send_window.h"

#include <algorithm>

namespace distgrad {

uint64_t SendWindow::acquired() const {
  absl::MutexLock lock(&mu_);
  return acquired_;
}

std::optional<SendWindow::Credit> SendWindow::TryAcquire(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (!waiting_.empty() || !Fits(bytes)) return std::nullopt;
  acquired_ += bytes;
  return Credit(shared_from_this(), bytes);
}

SendWindow::Credit SendWindow::Acquire(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  acquired_ += bytes;
  return Credit(shared_from_this(), bytes);
}

uint64_t SendWindow::AcquireAsync(uint64_t bytes, Callback callback) {
  absl::Status closed;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    if (closed.ok()) {
      if (!waiting_.empty() || !Fits(bytes)) {
        waiting_.push_back({++last_, bytes, std::move(callback)});
        return last_;
      }
      acquired_ += bytes;
    }
  }
  if (closed.ok()) {
    callback(Credit(shared_from_this(), bytes));
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
  Release(0);  // it may have stood before one that fits
}

void SendWindow::Close(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return;
    closed_ = why;
  }
  for (;;) {
    Waiter waiter;
    {
      absl::MutexLock lock(&mu_);
      if (waiting_.empty()) return;
      waiter = std::move(waiting_.front());
      waiting_.pop_front();
    }
    waiter.callback(why);
  }
}

void SendWindow::Release(uint64_t bytes) {
  const auto self = shared_from_this();  // a callback may drop the last other owner
  {
    absl::MutexLock lock(&mu_);
    acquired_ -= bytes;
    // What a waiter sends may be gone before its callback returns, which comes here again: the one
    // loop goes on, rather than a call within a call within a call.
    if (granting_) return;
    granting_ = true;
  }
  for (;;) {
    Waiter next;
    {
      absl::MutexLock lock(&mu_);
      if (!closed_.ok() || waiting_.empty() || !Fits(waiting_.front().bytes)) {
        granting_ = false;
        return;
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
      acquired_ += next.bytes;
    }
    next.callback(Credit(self, next.bytes));
  }
}

}  // namespace distgrad
