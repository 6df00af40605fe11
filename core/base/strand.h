// Runs tasks one at a time and in order, with no thread of its own: the thread that finds the
// strand idle runs its task at once, and then whatever others handed in meanwhile; or leaves that
// to a pool.
//
// So an uncontended strand costs no hand-over. Tasks are short, and never block. A task that
// calls Run() on its own strand has the new task run after it, not inside it. A task and what
// it owns are gone before the next one runs.
//
// What a task throws ends that task alone, and never reaches Run()'s caller, who may be there for
// another's task: the strand's owner is told in its place, and the next task runs.
//
// Thread-safe. Tasks that were handed in run even if the strand is destroyed meanwhile: often
// the last owner of an object goes with a task of that object's own strand.
#ifndef DISTGRAD_CORE_BASE_STRAND_H_
#define DISTGRAD_CORE_BASE_STRAND_H_

#include <deque>
#include <exception>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "core/base/thread_pool.h"

namespace distgrad {

class Strand {
 public:
  using Task = absl::AnyInvocable<void()>;
  // Is called on the strand while the task that threw still exists, so that what the task owns is
  // there. Must not throw.
  using OnThrow = absl::AnyInvocable<void(std::exception_ptr)>;

  explicit Strand(OnThrow on_throw);
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;

  // With `others` this thread runs no task but its own: what is handed in meanwhile runs on that
  // pool, and here only if the pool takes nothing. For a thread that is in the middle of something
  // else, under locks and in modes that the tasks of others must not see.
  void Run(Task task, ThreadPool* others = nullptr);

 private:
  struct State {
    explicit State(OnThrow the_on_throw) : on_throw(std::move(the_on_throw)) {}
    void RunTask(Task& task) noexcept;
    // Runs what waits, and leaves the strand idle.
    void RunWaiting();
    // Leaves the strand idle, and says so, unless something waits.
    bool EndIfNothingWaits();
    // Has the pool run what waits. False where it does not: it is closed, or there is no memory.
    static bool LeaveTo(ThreadPool& pool, std::shared_ptr<State> state) noexcept;

    OnThrow on_throw;  // by whoever runs a task

    absl::Mutex mu;
    bool running ABSL_GUARDED_BY(mu) = false;
    std::deque<Task> waiting ABSL_GUARDED_BY(mu);
  };

  const std::shared_ptr<State> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_STRAND_H_
