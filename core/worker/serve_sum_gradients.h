// What a worker does when another one, or itself, calls SumGradients(). Private to core/worker.
#ifndef DISTGRAD_CORE_WORKER_SERVE_SUM_GRADIENTS_H_
#define DISTGRAD_CORE_WORKER_SERVE_SUM_GRADIENTS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/autograd/context_registry.h"
#include "core/base/ids.h"
#include "core/tensor/message.h"
#include "core/worker/request.h"

namespace distgrad {

// A function of every worker. It is called in the context that gets the gradients; the payload has
// the ids of those that give theirs, in their order.
inline constexpr absl::string_view kSumGradients = "distgrad.context.sum";

Message EncodeSumGradients(const std::vector<ContextId>& others);
// Moves this worker's gradients of the others to the request's context. A context in which this
// worker never took part has none. kFailedPrecondition, with nothing changed here, for one that was
// released lately.
absl::StatusOr<Message> ServeSumGradients(const ContextRegistry& contexts, const Request& request);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_SERVE_SUM_GRADIENTS_H_
