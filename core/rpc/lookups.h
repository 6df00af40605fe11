// Asks the store who a worker is, on a thread of its own, so that nobody else waits for the store.
#ifndef DISTGRAD_CORE_RPC_LOOKUPS_H_
#define DISTGRAD_CORE_RPC_LOOKUPS_H_

#include <atomic>
#include <string>

#include "absl/functional/any_invocable.h"
#include "core/base/thread_pool.h"
#include "core/rpc/directory.h"
#include "core/rpc/membership.h"

namespace distgrad {

// Thread-safe.
class Lookups final : public Directory {
 public:
  // `members` must have entered the job before the first question, and outlive this. The thread
  // is named for `worker`, and starts with the first question.
  Lookups(const std::string& worker, Membership* members)
      : members_(members), thread_(worker + "-find", 1) {}
  ~Lookups() override { Close(); }

  void Find(WorkerId worker, Found found) override;
  void Find(std::string name, Found found);

  // Runs `task` in its turn, for what else waits for the store; destroys it unrun after Close(), or
  // where there is no thread to be had.
  void Run(absl::AnyInvocable<void()> task);

  // What was asked and not yet answered gets kCancelled; waits for its thread.
  void Close();

 private:
  // More than a worker can have reason to ask at once.
  static constexpr int kMaxWaiting = 4096;

  void Ask(absl::AnyInvocable<absl::StatusOr<WorkerInfo>()> question, Found found);

  Membership* const members_;
  std::atomic<bool> closed_{false};
  std::atomic<int> waiting_{0};
  ThreadPool thread_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_LOOKUPS_H_
