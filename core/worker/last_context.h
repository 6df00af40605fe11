// What a worker that has come back asks the others: which contexts are older than it. Private to
// core/worker.
#ifndef DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
#define DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/autograd/context_registry.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/base/ids.h"
#include "core/membership/lookups.h"
#include "core/membership/membership.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/tensor/message.h"
#include "core/worker/caller.h"

namespace distgrad {

// A function of every worker. One that leaves serves it, too, for its contexts may go on.
inline constexpr absl::string_view kLastContext = "distgrad.context.last";

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts);

// Which contexts of the others a worker that has come back refuses: all but those that began when
// no member had anything to do with its former incarnation any more. Thread-safe.
//
// Who has answered has ended what it had with that one. But another one, which has not, may still
// involve it in a context, whoever has made that: so all contexts are refused until all have
// answered, those aside that are lost or have left. Only then is each maker asked for its last
// context, and what it begins after its answer is accepted.
class LastContexts {
 public:
  // The parts that it works with, which outlive it.
  struct Parts {
    const WorkerInfo& self;
    absl::Duration heartbeat_limit;
    ContextRegistry& contexts;
    Caller& caller;
    Membership& members;
    Lookups& lookups;
    Agent& agent;
  };

  // Knows nobody, and refuses nothing, until ComeBack().
  explicit LastContexts(const Parts& parts) : parts_(parts) {}

  // Has all contexts refused of others, and of this worker's earlier incarnations. Before anything
  // of theirs can arrive. `ever`: all who ever were members, as the store has them when it has this
  // incarnation; who comes later knows of it.
  void ComeBack(absl::Span<const WorkerInfo> ever);
  // Asks the members, once, and waits for their answers: for some seconds each time, and until the
  // deadline at most. Logs who has not answered.
  void AskAll(Deadline deadline);
  // Goes on with that: asks those again who have not answered, or `maker` for its last context. For
  // each context that is refused, but ten times a second at most; does not wait. `owner` keeps this
  // alive.
  void AskAgain(WorkerRank maker, std::weak_ptr<void> owner);
  // Gives up what is asked, and asks nobody any more: what is refused stays so.
  void Stop();

 private:
  enum class Stage {
    kHasNotComeBack,
    kAllAreRefused,   // until all have answered
    kMakersAreAsked,  // each for its last context
  };
  using Answer = absl::StatusOr<ContextId>;

  absl::Duration Patience() const;
  Future<Message> Call(WorkerRank member, Deadline deadline, bool wait);
  static Answer Read(WorkerRank maker, const absl::StatusOr<Message>& answer);
  // Returns, for the log, who has not answered, and why.
  std::vector<std::string> AskAndWait(const std::vector<WorkerRank>& members, Deadline deadline);
  void Ask(const std::vector<WorkerRank>& members, const std::weak_ptr<void>& owner);
  // Returns whether this was the last answer for which GoOn() waits.
  bool Take(WorkerRank member, const Answer& last);
  void TakeAndGoOn(WorkerRank member, const Answer& last, const std::weak_ptr<void>& owner);
  // Asks the store who need not be waited for. If nobody is left, who has not answered, that is the
  // end of the first stage: returns whom to ask next, each of whom counts as asked. Else watches
  // those, for nobody else may: one that has joined may be gone before anybody has met it.
  absl::StatusOr<std::vector<WorkerRank>> GoOn(Deadline deadline);

  const Parts parts_;
  const std::shared_ptr<Cancellation> stop_ = std::make_shared<Cancellation>();

  absl::Mutex mu_;
  // Guarded by mu_.
  Stage stage_ ABSL_GUARDED_BY(mu_) = Stage::kHasNotComeBack;
  // Of the first stage: whether all are being asked, or the store after them; and how many have not
  // answered, nor failed to.
  bool is_busy_ ABSL_GUARDED_BY(mu_) = false;
  size_t awaited_ ABSL_GUARDED_BY(mu_) = 0;
  Deadline next_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // not asked again before
  // Those who have not answered in this stage.
  struct Unheard {
    Incarnation incarnation = 0;
    // In the second stage:
    bool is_asked = false;
    Deadline next = absl::InfinitePast();  // not asked again before
  };
  absl::flat_hash_map<WorkerRank, Unheard> unheard_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
