// Runs the timers of the real clock on a thread of its own.
#include "core/base/clock.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "core/base/check.h"
#include "core/base/status.h"
#include "core/base/steady_mutex.h"
#include "core/base/thread.h"
#include "core/base/timer_queue.h"

namespace distgrad {
namespace {

using Steady = std::chrono::steady_clock;

// Thread-safe.
class SystemClock final : public Clock {
 public:
  absl::Status Start() {
    DG_ASSIGN_OR_RETURN(thread_, StartThread("dg-clock", [this] { Run(); }));
    return absl::OkStatus();
  }

  ~SystemClock() override {
    if (!thread_.joinable()) return;  // it was not started
    DG_CHECK(thread_.get_id() != std::this_thread::get_id()) << "a timer destroyed its clock";
    {
      SteadyMutexLock lock(&mu_);
      stopping_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

  absl::Time Now() override { return start_ + absl::FromChrono(Steady::now() - steady_start_); }

  TimerId At(absl::Time when, absl::AnyInvocable<void()> callback) override {
    TimerId id;
    {
      SteadyMutexLock lock(&mu_);
      id = timers_.Add(when, std::move(callback));
      // Most timers are deadlines far away, taken back soon: the thread sleeps through them.
      if (when >= sleeping_until_) return id;
      sleeping_until_ = when;
    }
    wake_.NotifyOne();
    return id;
  }

  bool Cancel(TimerId timer) override {
    internal::TimerQueue::Callback callback;  // destroyed after the lock is given back
    SteadyMutexLock lock(&mu_);
    callback = timers_.Remove(timer);
    return callback != nullptr;
  }

 private:
  void Run() {
    SteadyMutexLock lock(&mu_);
    while (!stopping_) {
      const absl::Time next = timers_.Next();
      if (next == absl::InfiniteFuture()) {
        sleeping_until_ = next;
        wake_.Wait(&mu_);
      } else if (const absl::Duration left = next - Now(); left > absl::ZeroDuration()) {
        sleeping_until_ = next;
        // In steps, so that a far time cannot overflow the steady clock's range.
        wake_.WaitUntil(&mu_,
                        Steady::now() + absl::ToChronoNanoseconds(std::min(left, absl::Hours(24))));
      } else {
        internal::TimerQueue::Firing timer = timers_.Fire();
        // Awake: this thread looks at the queue again before it sleeps.
        sleeping_until_ = absl::InfinitePast();
        mu_.Unlock();
        const bool called = internal::TimerQueue::Call(timer);
        mu_.Lock();
        timers_.Fired(timer, called, Now());
        mu_.Unlock();
        timer = {};
        mu_.Lock();
      }
    }
  }

  // Constant after construction. The wall clock is read once: it may be set back.
  const absl::Time start_ = absl::Now();
  const Steady::time_point steady_start_ = Steady::now();

  SteadyMutex mu_;
  SteadyCondVar wake_;
  internal::TimerQueue timers_ ABSL_GUARDED_BY(mu_);
  absl::Time sleeping_until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;  // constant after Start(); joined by the destructor
};

}  // namespace

absl::StatusOr<std::unique_ptr<Clock>> NewSystemClock() {
  auto clock = std::make_unique<SystemClock>();
  DG_RETURN_IF_ERROR(clock->Start());
  return clock;
}

}  // namespace distgrad
