// Follows a context from worker to worker.
#include "core/worker/member_calls.h"

#include <set>
#include <utility>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/wire.h"

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
      WireReader reader(answer.payload);
      while (reader.ok() && reader.remaining() > 0) peers.insert(reader.U16());
      DG_RETURN_IF_ERROR(reader.status("the peers of a context"));
      replies.push_back(std::move(answer));
    }
    std::set<WorkerRank> unknown = peers;
    for (const Member& member : worker.members()) unknown.erase(member.rank);
    // Those who have left stay unknown.
    if (!unknown.empty()) DG_RETURN_IF_ERROR(worker.UpdateMembers());
  }
}

std::string NamePeers(absl::Span<ContextRecord* const> contexts) {
  std::set<WorkerRank> peers;
  for (const ContextRecord* const context : contexts) {
    for (const WorkerRank peer : context->Peers()) peers.insert(peer);
  }
  std::string payload;
  WireWriter writer(&payload);
  for (const WorkerRank peer : peers) writer.U16(peer);
  return payload;
}

}  // namespace distgrad
