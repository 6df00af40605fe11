// Named threads that run tasks, and stay as many as were asked for while some of them wait.
//
// A task may block (a handler that makes a nested call, say). While it does, inside a
// BlockingScope, the pool lets a spare thread take its place, so a pool of one thread still
// answers a call that comes back to it. When blocked tasks go on, more than `size` run for a
// moment. Threads start when they are first needed; a few spare ones are kept for next time.
//
// At most kMostSpareThreads run beyond `size`, and the machine may give fewer. What comes then
// waits until one of the threads is free, or the machine, asked again by the clock, gives one.
//
// Thread-safe.
#ifndef DISTGRAD_CORE_BASE_THREAD_POOL_H_
#define DISTGRAD_CORE_BASE_THREAD_POOL_H_

#include <cstddef>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/blocking.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/sleepers.h"

namespace distgrad {

class ThreadPool final : private Blockable {
 public:
  using Task = absl::AnyInvocable<void()>;

  // So deep may calls between workers be nested. A limit on processes, of a user or a container, is
  // often a few thousand.
  static constexpr size_t kMostSpareThreads = 1024;

  // How long after the machine has refused a thread it is asked again.
  static constexpr absl::Duration kRetryDelay = absl::Milliseconds(100);

  // How many of its threads wait for tasks when there are none, a few spare ones apart: as many as
  // run at the same time, or none, where `size` only bounds how many there may be.
  enum class Idle { kKeepAll, kKeepNone };

  // `size` >= 1 threads that run at the same time, named "<name>-<n>" (cut to 15 bytes). A pool
  // whose tasks block needs the clock: all of its threads may wait for what a refused one was to
  // do.
  ThreadPool(std::string name, size_t size, Clock* clock = nullptr, Idle idle = Idle::kKeepAll);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();  // Close() and Join()

  // Starts the first thread, which stays until Close(): from then on every task that is taken will
  // run. kResourceExhausted where the machine gives none.
  absl::Status Start();

  // Runs `task` on one of the threads. After Close() the task is destroyed unrun and false
  // is returned; likewise if there is no thread, and the machine gives none. Throws std::bad_alloc
  // if there is no memory for the task, or to ask again for the thread that it needs. Tasks must
  // not throw.
  bool Schedule(Task task);

  // The same, but only on a thread that is to be had now; it need not wait for another task.
  bool ScheduleNow(Task task);

  // The same; but where fewer than `size` tasks run, and the calling thread handles events of a
  // loop that can do without it for `work` (EventLoop::CanRunDeferred), that thread runs the task,
  // as one of these. With null `work` it then goes on with others that wait, as it does where the
  // pool has no thread of its own and gets none.
  bool ScheduleInline(Task task, const void* work = nullptr);

  // Takes no more tasks; those accepted still run.
  void Close();

  // Waits until every accepted task has run and every thread has ended. Calls Close(). False if
  // the deadline has passed before; then it may be called again. Must not be called by a task.
  bool Join(Deadline deadline = Deadline::Never());

  // How many threads it has, and how many others run a task of it.
  size_t thread_count() const;

  // Whether the calling thread is one of this pool's, or runs one of its tasks.
  bool OnThisPool() const;

 private:
  struct Parked;
  using Threads = std::list<std::thread>;

  void OnBlocked() override;
  void OnUnblocked() override;
  // What each thread runs.
  void Run(Threads::iterator self);
  // Waits for a slot or for the end; false if this thread is to end.
  bool Park() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Gives a free slot, if a task is waiting for one, to a parked or a new thread. False if there is
  // neither: then it says so in the log, and asks again later. Throws std::bad_alloc if there is no
  // memory for that.
  bool FillSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The same, but if there is neither it only returns why there is no new one.
  absl::Status TryFillSlot() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes back the task that came last.
  Task TakeBack() ABSL_ASSERT_EXCLUSIVE_LOCK(mu_);
  void RetryLater() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status StartOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Runs what waits, with the slot of the calling thread.
  void RunTasks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // For a borrowed thread: one that is not of the pool, runs a task of it, and then those that wait
  // if it `stays`, or if there is no other thread for them.
  bool TakeSlotForBorrowed();
  void RunBorrowed(Task task, bool stays);
  // Where a thread has ended.
  void WakeJoiners() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool NoThreads() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return threads_.empty() && borrowed_ == 0;
  }
  bool NoRetry() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !retry_.has_value(); }

  // Constant after construction.
  const std::string name_;
  const size_t size_;
  Clock* const clock_;  // may be null
  const size_t kept_;   // so many threads wait for tasks

  absl::Mutex joining_;  // held by Join at the end, so that each of several callers waits to it

  mutable absl::Mutex mu_;
  // Guarded by mu_. Whenever it is free, no task waits, or all slots are taken, or there is no
  // thread for a free one.
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  // Slots taken: threads not parked and not blocked, those of borrowed threads among them.
  size_t running_ ABSL_GUARDED_BY(mu_) = 0;
  size_t borrowed_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Parked*> parked_ ABSL_GUARDED_BY(mu_);  // the last one in is the first one out
  Threads threads_ ABSL_GUARDED_BY(mu_);
  std::thread ended_ ABSL_GUARDED_BY(mu_);  // the last that ended; joined by the next, or by Join
  size_t started_ ABSL_GUARDED_BY(mu_) = 0;
  bool short_of_threads_ ABSL_GUARDED_BY(mu_) = false;        // since it was last said in the log
  std::optional<Clock::TimerId> retry_ ABSL_GUARDED_BY(mu_);  // until its callback is through
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Sleepers joiners_ ABSL_GUARDED_BY(mu_);  // woken when there are no threads
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_THREAD_POOL_H_
