// Follows a context from worker to worker.
#include "core/worker/member_calls.h"

#include <set>
#include <utility>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/worker/context_peers.h"

namespace distgrad {

absl::StatusOr<std::vector<Message>> CallWorkers(Worker& worker,
                                                 absl::Span<const WorkerRef> workers,
                                                 const std::string& function,
                                                 const Message& message, const Context* context) {
  std::vector<Message> replies;
  for (absl::StatusOr<Message>& reply :
       worker.CallEach(workers, function, message, {.context = context})) {
    DG_RETURN_IF_ERROR(reply.status());
    replies.push_back(*std::move(reply));
  }
  return replies;
}

absl::StatusOr<std::vector<Message>> CallMembers(Worker& worker, const std::string& function,
                                                 const Message& message, const Context& context) {
  std::vector<Message> replies;
  std::set<WorkerRank> asked, peers;
  for (;;) {
    std::vector<WorkerRef> due;
    for (const Member& member : worker.members()) {
      // The first round is of all that are known.
      const bool is_due = replies.empty() || peers.count(member.rank) > 0;
      if (is_due && asked.insert(member.rank).second) due.emplace_back(member.rank);
    }
    if (due.empty()) return replies;
    DG_ASSIGN_OR_RETURN(std::vector<Message> answers,
                        CallWorkers(worker, due, function, message, &context));
    for (Message& answer : answers) {
      DG_RETURN_IF_ERROR(ReadPeers(answer.payload, &peers));
      replies.push_back(std::move(answer));
    }
    std::set<WorkerRank> unknown = peers;
    for (const Member& member : worker.members()) unknown.erase(member.rank);
    // Those who have left stay unknown.
    if (!unknown.empty()) DG_RETURN_IF_ERROR(worker.UpdateMembers());
  }
}

}  // namespace distgrad
