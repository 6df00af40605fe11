// Keeps and tells what a worker knows of the members of its job.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/context_record.h"
#include "core/autograd/context_registry.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"
#include "core/worker/worker_impl.h"

namespace distgrad {
namespace {

// Counts the contexts that this worker takes part in. Others go on calling one that leaves, each
// time in another context, maybe.
size_t CountTaken(const ContextRegistry& contexts) {
  const std::vector<std::shared_ptr<ContextRecord>> all = contexts.All();
  return absl::c_count_if(all, [](const auto& record) { return !record->refused(); });
}

}  // namespace

std::vector<Member> WorkerImpl::members() const {
  std::vector<Member> members;
  for (const WorkerInfo& worker : agent_->Members()) {
    members.push_back({worker.rank, worker.name, worker.incarnation});
  }
  return members;
}

std::vector<Member> WorkerImpl::MembersOnThisMachine() const {
  std::vector<Member> members;
  for (const WorkerInfo& worker : agent_->Members()) {
    if (!job_.transport->IsOnThisMachine(worker.address)) continue;
    if (agent_->LossOf(worker.rank, worker.incarnation) != 0) continue;
    members.push_back({worker.rank, worker.name, worker.incarnation});
  }
  return members;
}

absl::Status WorkerImpl::UpdateMembers(Deadline deadline) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> all, members_->AllEver(deadline));
  return member_sync_.UpdatePeers(all);
}

absl::Status WorkerImpl::Barrier(Deadline deadline, OnLost on_lost) {
  const BlockingScope blocking;
  return member_sync_.NameTheStore(
      members_->Barrier(deadline, on_lost, [&] { return UpdateMembers(deadline); }));
}

absl::Status WorkerImpl::CheckMayLeave() const {
  if (!pool_.OnThisPool()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("worker '", self_.name,
                   "' cannot leave in a handler or a callback of its own, for it waits for those"));
}

// When all are there, no user's thread makes a call any more; handlers may. When then each has seen
// its calls end, in either direction, none of those makes one either.
absl::Status WorkerImpl::Shutdown(Deadline deadline, OnLost on_lost) {
  DG_RETURN_IF_ERROR(CheckMayLeave());
  BlockingScope blocking;
  DG_RETURN_IF_ERROR(member_sync_.NameTheStore(members_->Shutdown(
      deadline, on_lost, [&] { return AwaitIdle(deadline, /*contexts=*/false); })));
  agent_->StopWatching();
  return absl::OkStatus();
}

absl::Status WorkerImpl::AwaitIdle(Deadline deadline, bool contexts) {
  // Who leaves accepts nothing new. At the end of the job handlers may still begin contexts.
  if (contexts) last_contexts_.Stop();
  Backoff backoff(deadline);
  size_t serving, calls, of_contexts;
  do {
    if (members_->closed()) {
      return absl::CancelledError(absl::StrCat("worker '", self_.name, "' is shutting down"));
    }
    serving = agent_->served();
    calls = agent_->in_flight();
    of_contexts = contexts ? CountTaken(contexts_) : 0;
    if (serving == 0 && calls == 0 && of_contexts == 0) return absl::OkStatus();
  } while (backoff.Sleep());
  std::string left =
      absl::StrCat("worker '", self_.name, "' leaves, and this is not over: ", serving,
                   " calls of others, ", calls, " calls of its own");
  if (contexts) absl::StrAppend(&left, ", ", of_contexts, " contexts");
  return absl::DeadlineExceededError(left);
}

void WorkerImpl::OnMember(MemberCallback::Function callback) {
  const bool wanted = callback != nullptr;
  member_callback_.Set(std::move(callback));
  if (wanted) member_sync_.Follow();
}

// Calls of a context that this worker takes part in belong to what is in flight.
bool WorkerImpl::Refuses(ContextId context) const {
  if (!leaving_) return false;
  const auto record = context == 0 ? nullptr : contexts_.Find(context);
  return record == nullptr || record->refused();
}

absl::Status WorkerImpl::Leave(Deadline deadline) {
  DG_RETURN_IF_ERROR(CheckMayLeave());
  if (job_.serves_store) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name,
                     "' serves the job's store, and cannot leave while the job goes on"));
  }
  if (leaving_.exchange(true)) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", self_.name, "' is leaving already"));
  }
  // A worker that is not connected learns it from the store when it connects.
  const absl::Status said = members_->Leave(deadline);
  if (absl::IsFailedPrecondition(said)) return said;  // this one is over, and nobody waits for it
  agent_->SayLeaving();
  BlockingScope blocking;
  DG_RETURN_IF_ERROR(AwaitIdle(deadline, /*contexts=*/true));
  agent_->StopWatching();
  return said;
}

}  // namespace distgrad
