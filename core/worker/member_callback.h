// Gives what happens to members to a user's callback.
#ifndef DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_
#define DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

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

  // Both must outlive the last task on the pool. The agent keeps events until this takes them.
  MemberCallback(ThreadPool* pool, Agent* agent) : pool_(pool), agent_(agent) {}

  // Takes the place of the former function, which runs no more when this returns: it waits for that
  // one, unless the calling thread is in it. Null: none.
  void Set(Function function);
  // Runs none from now on but for one that runs already, for which this does not wait.
  void Stop();
  bool is_set();

  // There may be events to take.
  void OnEvents();

 private:
  // On the pool, one at a time.
  void Run();
  // Null if there are no more.
  std::unique_ptr<MemberEvent> Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  ThreadPool* const pool_;
  Agent* const agent_;

  absl::Mutex mu_;
  // Guarded by mu_.
  std::shared_ptr<const Function> function_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<const Function> running_ ABSL_GUARDED_BY(mu_);  // null between events
  std::thread::id thread_ ABSL_GUARDED_BY(mu_);                   // that runs it
  bool scheduled_ ABSL_GUARDED_BY(mu_) = false;                   // Run(), or it runs
  std::vector<MemberEvent> events_ ABSL_GUARDED_BY(mu_);          // taken, the next one last
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_MEMBER_CALLBACK_H_
