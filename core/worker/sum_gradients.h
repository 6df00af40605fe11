// Gradients of several contexts, for one step of an optimizer: gradient accumulation.
//
//   std::vector<const Context*> contexts = ...;                 // each after its backward
//   absl::Status summed = SumGradients(*worker, contexts);      // on one worker
//   absl::Status done = optimizer->Step(*contexts[0]);
//
// Several backwards of one context add up without it.
#ifndef DISTGRAD_CORE_WORKER_SUM_GRADIENTS_H_
#define DISTGRAD_CORE_WORKER_SUM_GRADIENTS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/worker/context.h"
#include "core/worker/worker.h"

namespace distgrad {

// Moves the gradients of all contexts into the first one, on every worker of the job, and waits:
// each leaf then has there what the first context had for it, and to that those of the others were
// added in their order: to the last bit what one process gives that adds up the backwards of each
// context first. The other contexts have no gradients any more. So a step, clipping and an average
// take the sums from the first context, which is the worker's; the others are its own, or those of
// other members of its job in this process. Call it when the backwards are over.
//
// kInvalidArgument, and nothing has changed, without a context, or with one that is null, there
// twice, or of a worker that this one does not know as a member of its job; kFailedPrecondition for
// one that is not valid, released, or averaged in its backward
// (GradientAverager::AverageInBackward) without that average having been taken. After an error of a
// worker the contexts are good for Release() only.
absl::Status SumGradients(Worker& worker, absl::Span<const Context* const> contexts);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_SUM_GRADIENTS_H_
