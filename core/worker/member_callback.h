// Calls a user's callback with what happens to members.
#ifndef DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_
#define DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_

#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/thread_pool.h"
#include "core/membership/member_event.h"
#include "core/rpc/agent.h"

namespace distgrad {

// Thread-safe.
class MemberCallback {
 public:
  using Function = std::function<void(const MemberEvent&)>;

  // `pool` and `agent` must outlive the last task on the pool. The agent keeps events until this
  // takes them.
  MemberCallback(ThreadPool* pool, Agent* agent) : pool_(pool), agent_(agent) {}

  // Replaces the function by another; null: none. The former one runs no more when this returns: it
  // waits for that one, unless the calling thread is in it.
  void Set(Function function);
  // Calls no function from now on; one that runs already goes on, and this does not wait for it.
  void Stop();
  bool is_set();

  // Says that there may be events to take.
  void OnEvents();

 private:
  // Runs on the pool, one at a time.
  void Run();
  // Takes the next event; none if there are no more. Needs no memory.
  Peers::Events Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ThreadPool* const pool_;
  Agent* const agent_;

  absl::Mutex mu_;
  // Guarded by mu_.
  std::shared_ptr<const Function> function_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const Function> running_ ABSL_GUARDED_BY(mu_);  // null between events
  std::thread::id thread_ ABSL_GUARDED_BY(mu_);                   // that runs it
  bool scheduled_ ABSL_GUARDED_BY(mu_) = false;                   // Run(), or it runs
  Peers::Events events_ ABSL_GUARDED_BY(mu_);                     // taken, the next one first
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_
