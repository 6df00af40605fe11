// Runs tasks one at a time and in order, with no thread of its own: the thread that finds the
// strand idle runs its task at once, and then whatever others handed in meanwhile.
//
// So an uncontended strand costs no hand-over. Tasks are short, and never block. A task that
// calls Run() on its own strand has the new task run after it, not inside it. A task and what
// it owns are gone before the next one runs.
//
// Thread-safe. Tasks that were handed in run even if the strand is destroyed meanwhile: often
// the last owner of an object goes with a task of that object's own strand.
#ifndef DISTGRAD_CORE_BASE_STRAND_H_
#define DISTGRAD_CORE_BASE_STRAND_H_

#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

class Strand {
 public:
  using Task = absl::AnyInvocable<void()>;

  Strand() : state_(std::make_shared<State>()) {}
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  void Run(Task task);

 private:
  struct State {
    absl::Mutex mu;
    bool running ABSL_GUARDED_BY(mu) = false;
    std::deque<Task> waiting ABSL_GUARDED_BY(mu);
  };

  const std::shared_ptr<State> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_STRAND_H_
