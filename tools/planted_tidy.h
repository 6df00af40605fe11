// What //tools:clang_tidy_test is for, planted: clang_tidy_finds_test wants a finding for each line
// that names one in a comment, and no other.
#ifndef DISTGRAD_TOOLS_PLANTED_TIDY_H_
#define DISTGRAD_TOOLS_PLANTED_TIDY_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/steady_mutex.h"

namespace distgrad {

class PlantedTidy {
 public:
  int Get() const {
    absl::MutexLock lock(&mu_);
    return guarded_;
  }
  int GetWithoutLock() const {
    return guarded_;  // finds clang-diagnostic-thread-safety-analysis
  }
  int GetByPointerWithoutLock() const {
    return *pointed_to_;  // finds clang-diagnostic-thread-safety-analysis
  }
  void AddOnce();
  void AddTwice();
  void KeepLocked();
  void WaitWithoutLock();

 private:
  void AddLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { ++guarded_; }

  mutable absl::Mutex mu_;
  int guarded_ ABSL_GUARDED_BY(mu_) = 0;
  int* pointed_to_ ABSL_PT_GUARDED_BY(mu_) = nullptr;
  SteadyMutex steady_mu_;
  SteadyCondVar steady_changed_;
  int steady_ ABSL_GUARDED_BY(steady_mu_) = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_TOOLS_PLANTED_TIDY_H_
