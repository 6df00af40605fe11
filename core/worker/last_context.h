// What a worker that has come back asks the others: which contexts are older than it. Private to
// core/worker.
#ifndef DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
#define DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/autograd/context_registry.h"
#include "core/base/ids.h"
#include "core/membership/worker_info.h"
#include "core/tensor/message.h"
#include "core/worker/caller.h"

namespace distgrad {

// A function of every worker.
inline constexpr absl::string_view kLastContext = "distgrad.context.last";

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts);

// Which contexts of the others a worker that has come back refuses: all, until their maker has said
// up to which they are older. Thread-safe.
class LastContexts {
 public:
  // All outlive it. Knows nobody, and refuses nothing, until ComeBack().
  LastContexts(WorkerRank self, ContextRegistry& contexts, Caller& caller)
      : self_(self), contexts_(contexts), caller_(caller) {}

  // Has all contexts refused of those who ever were members, as they are now, and of this worker's
  // earlier incarnations. Before anything of theirs can arrive. Those of who has left stay so.
  void ComeBack(absl::Span<const WorkerInfo> ever);
  // Asks the members, and waits for so long in each of two rounds. Who is asked by a later
  // incarnation has ended what it had with the earlier one, so in the second round nobody has that
  // any more whom a context could involve that begins after its answer.
  void AskAll(absl::Duration patience);
  // Asks one that has not answered yet, if it is any. Does not wait. `owner` keeps this alive.
  void AskAgain(WorkerRank maker, std::weak_ptr<void> owner);

 private:
  using Answer = absl::StatusOr<ContextId>;
  static Answer Read(WorkerRank maker, const absl::StatusOr<Message>& answer);
  void Take(WorkerRank maker, const Answer& last);

  const WorkerRank self_;
  ContextRegistry& contexts_;
  Caller& caller_;

  absl::Mutex mu_;
  absl::flat_hash_map<WorkerRank, bool> unheard_ ABSL_GUARDED_BY(mu_);  // whether it is being asked
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
