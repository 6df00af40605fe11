// What a worker that has come back asks the others: which contexts are older than it. Private to
// core/worker.
#ifndef DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
#define DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/autograd/context_registry.h"
#include "core/base/deadline.h"
#include "core/base/ids.h"
#include "core/membership/worker_info.h"
#include "core/tensor/message.h"
#include "core/worker/caller.h"

namespace distgrad {

// A function of every worker. Who is called by a later incarnation has ended what it had with an
// earlier one, so that no context which begins after the answer involves that.
inline constexpr absl::string_view kLastContext = "distgrad.context.last";

absl::StatusOr<Message> ServeLastContext(const ContextRegistry& contexts);
// Asks all members but this worker, and waits. What one that cannot be reached in time has begun is
// not in the result: its contexts end without it.
std::vector<ContextId> AskForLastContexts(Caller& caller, WorkerRank self,
                                          absl::Span<const WorkerInfo> members, Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_LAST_CONTEXT_H_
