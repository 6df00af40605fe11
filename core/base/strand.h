// Runs tasks one at a time and in order, with no thread of its own: the thread that finds the
// strand idle runs its task at once, and then whatever others handed in meanwhile.
//
// So an uncontended strand costs no hand-over. Tasks are short, and never block. A task that
// calls Run() on its own strand has the new task run after it, not inside it.
//
// Thread-safe. The strand may be destroyed only when no task is running or waiting.
#ifndef DISTGRAD_CORE_BASE_STRAND_H_
#define DISTGRAD_CORE_BASE_STRAND_H_

#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

class Strand {
 public:
  using Task = absl::AnyInvocable<void()>;

  Strand() = default;
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  void Run(Task task);

 private:
  absl::Mutex mu_;
  bool running_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Task> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_STRAND_H_
