// A mutex of which clang checks what it guards, as of absl::Mutex, and whose timed waits follow the
// steady clock; absl::Mutex's follow the wall clock, which may be set.
#ifndef DISTGRAD_CORE_BASE_STEADY_MUTEX_H_
#define DISTGRAD_CORE_BASE_STEADY_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace distgrad {

class ABSL_LOCKABLE SteadyMutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }

 private:
  friend class SteadyCondVar;
  std::mutex mu_;
};

// Has a mutex as long as it lives.
class ABSL_SCOPED_LOCKABLE SteadyMutexLock {
 public:
  explicit SteadyMutexLock(SteadyMutex* mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) {
    mu_->Lock();
  }
  ~SteadyMutexLock() ABSL_UNLOCK_FUNCTION() { mu_->Unlock(); }
  SteadyMutexLock(const SteadyMutexLock&) = delete;
  SteadyMutexLock& operator=(const SteadyMutexLock&) = delete;

 private:
  SteadyMutex* const mu_;
};

// Wakes threads that wait. Waits give the mutex back meanwhile, and may end though nobody notified:
// so whoever waits for something looks whether it is there. Thread-safe.
class SteadyCondVar {
 public:
  void Wait(SteadyMutex* mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu->mu_, std::adopt_lock);
    wake_.wait(lock);
    lock.release();
  }
  // Returns false if it is `until` or later.
  bool WaitUntil(SteadyMutex* mu, std::chrono::steady_clock::time_point until)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu->mu_, std::adopt_lock);
    const std::cv_status status = wake_.wait_until(lock, until);
    lock.release();
    return status == std::cv_status::no_timeout;
  }
  void NotifyOne() { wake_.notify_one(); }
  void NotifyAll() { wake_.notify_all(); }

 private:
  std::condition_variable wake_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_STEADY_MUTEX_H_
