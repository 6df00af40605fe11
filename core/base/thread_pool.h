// Named threads that run tasks, and stay as many as were asked for while some of them wait.
//
// A task may block (a handler that makes a nested call, say). While it does, inside a
// BlockingScope, the pool lets a spare thread take its place, so a pool of one thread still
// answers a call that comes back to it. Spare threads end when the blocked ones return.
//
// Thread-safe.
#ifndef DISTGRAD_CORE_BASE_THREAD_POOL_H_
#define DISTGRAD_CORE_BASE_THREAD_POOL_H_

#include <cstddef>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

class ThreadPool {
 public:
  using Task = absl::AnyInvocable<void()>;

  // `size` >= 1 threads that run at the same time, named "<name>-<n>" (cut to 15 bytes).
  ThreadPool(std::string name, size_t size);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();  // Close() and Join()

  // Runs `task` on one of the threads. After Close() the task is destroyed unrun and false
  // is returned. Tasks must not throw.
  bool Schedule(Task task);

  // Takes no more tasks; those accepted still run.
  void Close();

  // Waits until every accepted task has run and every thread has ended. Calls Close(). Must
  // not be called by a task.
  void Join();

  // Whether the calling thread is one of this pool's.
  bool OnThisPool() const;

  // Says that the calling thread is about to wait for something. Does nothing on a thread
  // that belongs to no pool. Nests.
  class BlockingScope {
   public:
    BlockingScope();
    ~BlockingScope();
    BlockingScope(const BlockingScope&) = delete;
    BlockingScope& operator=(const BlockingScope&) = delete;

   private:
    ThreadPool* const pool_;
  };

 private:
  void Run();
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const std::string name_;
  const size_t size_;

  absl::Mutex mu_;
  // Guarded by mu_.
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  size_t running_ ABSL_GUARDED_BY(mu_) = 0;  // threads alive and not blocked
  size_t idle_ ABSL_GUARDED_BY(mu_) = 0;     // of those, waiting for a task
  size_t named_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_THREAD_POOL_H_
