// Asks for the last context of each member, and reads the answers.
#include "core/worker/last_context.h"

#include <utility>

#include "core/base/future.h"
#include "core/base/wire.h"

namespace distgrad {

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts) {
  Message message;
  WireWriter(&message.payload).U64(contexts.last());
  return message;
}

std::vector<ContextId> AskForLastContexts(Caller& caller, WorkerRank self,
                                          absl::Span<const WorkerInfo> members, Deadline deadline) {
  std::vector<std::pair<WorkerRank, Future<Message>>> calls;
  for (const WorkerInfo& member : members) {
    if (member.rank == self) continue;
    calls.emplace_back(member.rank, caller.Call(member.rank, kLastContext, Message(),
                                                {.deadline = deadline}, /*wait=*/true));
  }
  std::vector<ContextId> last;
  for (auto& [rank, call] : calls) {
    const absl::StatusOr<Message> answer = call.Take();
    if (!answer.ok()) continue;
    WireReader reader(answer->payload);
    const ContextId id = reader.U64();
    // A member speaks for its own contexts alone.
    if (reader.status("the last context").ok() && MakerOf(id) == rank) last.push_back(id);
  }
  return last;
}

}  // namespace distgrad
