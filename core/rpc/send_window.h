// Bounds the bytes that wait to be sent to one peer: a sender acquires credit first, and releases
// it when the bytes have left. See docs/threading.md, "Backpressure".
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
  // Credit that was acquired. Its destructor releases it. Movable.
  class Credit {
   public:
    Credit() = default;
    Credit(std::shared_ptr<SendWindow> window, uint64_t bytes)
        : window_(std::move(window)), bytes_(bytes) {}
    Credit(Credit&& other) noexcept = default;
    Credit& operator=(Credit&& other) noexcept {
      Release();
      window_ = std::move(other.window_);
      bytes_ = other.bytes_;
      return *this;
    }
    ~Credit() { Release(); }

    const SendWindow* window() const { return window_.get(); }
    void Release() {
      if (const auto window = std::exchange(window_, nullptr)) window->Release(bytes_);
    }

   private:
    std::shared_ptr<SendWindow> window_;
    uint64_t bytes_ = 0;
  };
  using Callback = absl::AnyInvocable<void(absl::StatusOr<Credit>)>;

  explicit SendWindow(uint64_t limit) : limit_(limit) {}

  uint64_t limit() const { return limit_; }
  uint64_t acquired() const;

  // Acquires credit at once, or none. There is some for what fits below the limit, and for anything
  // when nothing is acquired; and not while others wait.
  std::optional<Credit> TryAcquire(uint64_t bytes);
  // Acquires credit even past the limit: for what must go, and is bounded otherwise.
  Credit Acquire(uint64_t bytes);
  // Acquires credit in the order of the calls. `callback` is called exactly once: on this thread if
  // there is credit, else on one that releases some, with no lock held; it must not block. Returns
  // a number for Withdraw(), 0 if it was called.
  uint64_t AcquireAsync(uint64_t bytes, Callback callback);
  // Ends a wait: the callback gets `why`, unless it was called before.
  void Withdraw(uint64_t number, const absl::Status& why);

  // Gives `why` to all that wait, and those that will. Called once.
  void Close(const absl::Status& why);

 private:
  struct Waiter {
    uint64_t number;
    uint64_t bytes;
    Callback callback;
  };

  bool Fits(uint64_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return acquired_ == 0 || (bytes <= limit_ && acquired_ <= limit_ - bytes);
  }
  void Release(uint64_t bytes);

  const uint64_t limit_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  uint64_t acquired_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  bool granting_ ABSL_GUARDED_BY(mu_) = false;  // a thread calls waiters
  std::deque<Waiter> waiting_ ABSL_GUARDED_BY(mu_);
  absl::Status closed_ ABSL_GUARDED_BY(mu_);  // why; OK while open
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_SEND_WINDOW_H_
