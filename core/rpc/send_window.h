// Bounds the bytes that wait to be sent to one peer: who sends takes room first, and gives it back
// when the bytes have left. See docs/threading.md, "When a peer is slow".
#ifndef DISTGRAD_CORE_RPC_SEND_WINDOW_H_
#define DISTGRAD_CORE_RPC_SEND_WINDOW_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

// Thread-safe.
class SendWindow : public std::enable_shared_from_this<SendWindow> {
 public:
  // Room that was taken. Gives it back at its end. Movable.
  class Room {
   public:
    Room() = default;
    Room(std::shared_ptr<SendWindow> window, uint64_t bytes)
        : window_(std::move(window)), bytes_(bytes) {}
    Room(Room&& other) noexcept = default;
    Room& operator=(Room&& other) noexcept {
      GiveBack();
      window_ = std::move(other.window_);
      bytes_ = other.bytes_;
      return *this;
    }
    ~Room() { GiveBack(); }

    const SendWindow* window() const { return window_.get(); }
    void GiveBack() {
      if (const auto window = std::exchange(window_, nullptr)) window->GiveBack(bytes_);
    }

   private:
    std::shared_ptr<SendWindow> window_;
    uint64_t bytes_ = 0;
  };
  using Callback = absl::AnyInvocable<void(absl::StatusOr<Room>)>;

  explicit SendWindow(uint64_t limit) : limit_(limit) {}

  uint64_t limit() const { return limit_; }
  uint64_t taken() const;

  // There is room for what fits below the limit, and for anything when nothing is taken; and not
  // while others wait.
  std::optional<Room> TryTake(uint64_t bytes);
  // Room or not: for what must go, and is bounded otherwise.
  Room Take(uint64_t bytes);
  // First come, first served. `callback` is called exactly once: on this thread if there is room,
  // else on one that gives room back, with no lock held; it must not block. Returns a number for
  // Withdraw(), 0 if it was called.
  uint64_t TakeLater(uint64_t bytes, Callback callback);
  // Waits no longer: the callback gets `why`, unless it was called before.
  void Withdraw(uint64_t waiter, const absl::Status& why);

  // Whoever waits, or will, gets `why`. Once.
  void Close(const absl::Status& why);

 private:
  struct Waiter {
    uint64_t number;
    uint64_t bytes;
    Callback callback;
  };

  bool Fits(uint64_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return taken_ == 0 || (bytes <= limit_ && taken_ <= limit_ - bytes);
  }
  void GiveBack(uint64_t bytes);

  const uint64_t limit_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  uint64_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  bool granting_ ABSL_GUARDED_BY(mu_) = false;  // a thread calls waiters
  std::deque<Waiter> waiting_ ABSL_GUARDED_BY(mu_);
  absl::Status closed_ ABSL_GUARDED_BY(mu_);  // why; OK while open
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_SEND_WINDOW_H_
