// Whether work is still wanted: the caller that asked for it says when it is not wanted any more,
// and the handler that does it checks now and then, or is told.
//
//   if (cancellation->cancelled()) return cancellation->why();
//   const uint64_t watch = cancellation->OnCancel([&] { stream.Stop(); });
//   ...
//   cancellation->Forget(watch);  // from here on the callback does not run, nor will it
#ifndef DISTGRAD_CORE_BASE_CANCELLATION_H_
#define DISTGRAD_CORE_BASE_CANCELLATION_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

// Thread-safe.
class Cancellation {
 public:
  using Callback = absl::AnyInvocable<void()>;

  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // Returns the reason; OK until cancelled.
  absl::Status why() const;

  // Calls what watches, on this thread and with no lock held. The first reason stays.
  void Cancel(absl::Status why);

  // Has `callback` called once on cancel, on the thread that cancels; at once if that was before.
  // It must not block; what it throws is logged, and goes no further. Returns a number for
  // ForgetWithoutWaiting(); 0 if it was called.
  uint64_t OnCancel(Callback callback);
  // Keeps the callback from being called from now on, unless it is called at this moment. Does not
  // wait.
  void ForgetWithoutWaiting(uint64_t watch);
  // Does the same, and waits while another thread calls it: what the callback uses may end then.
  // (In the callback itself there is nothing to wait for.)
  void Forget(uint64_t watch);

 private:
  std::atomic<bool> cancelled_{false};

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  absl::Status why_ ABSL_GUARDED_BY(mu_);
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  // The callbacks in the order of OnCancel(); once cancelled the other way round, the next one
  // last.
  std::vector<std::pair<uint64_t, Callback>> watches_ ABSL_GUARDED_BY(mu_);
  uint64_t called_ ABSL_GUARDED_BY(mu_) = 0;     // the watch that runs, or ends, at this moment
  std::thread::id thread_ ABSL_GUARDED_BY(mu_);  // that calls it
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_CANCELLATION_H_
