// Calls of distgrad's own to every worker of the job, for what each of them has in a context.
#ifndef DISTGRAD_CORE_WORKER_MEMBER_CALLS_H_
#define DISTGRAD_CORE_WORKER_MEMBER_CALLS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/tensor/message.h"
#include "core/worker/context.h"
#include "core/worker/worker.h"

namespace distgrad {

// Calls a function of these workers, and waits for all, and where need be for room on the way to
// them: who is refused has not done what the others have. Returns their replies in their order; or
// the first error, by worker, when all have answered. The context may be null.
absl::StatusOr<std::vector<Message>> CallWorkers(Worker& worker,
                                                 absl::Span<const WorkerRef> workers,
                                                 const std::string& function,
                                                 const Message& message, const Context* context);

// The same of all members, each of which serves the function with a reply that NamePeers()
// (context_peers.h) has made. A member that has joined, and of which this worker has not heard, is
// among those: what it has of the context came by way of another one, whose reply names it. The
// store is asked only then. Those found so come last.
absl::StatusOr<std::vector<Message>> CallMembers(Worker& worker, const std::string& function,
                                                 const Message& message, const Context& context);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_MEMBER_CALLS_H_
