// One optimizer step on every worker of a job, from the gradients of a context.
//
//   Optimizer optimizer(worker.get(), std::make_unique<torch::optim::SGD>(my_parameters, 0.1));
//   ...                                       // on every worker, before the first step
//   absl::Status done = optimizer.Step(context);       // on one of them
#ifndef DISTGRAD_CORE_WORKER_OPTIMIZER_H_
#define DISTGRAD_CORE_WORKER_OPTIMIZER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/optim/local_optimizer.h"
#include "core/worker/worker.h"

namespace distgrad {

// Thread-safe.
class Optimizer {
 public:
  // Makes `optimizer` this worker's part of the optimizer `name`. The worker must outlive it.
  Optimizer(Worker* worker, std::unique_ptr<torch::optim::Optimizer> optimizer,
            absl::string_view name = "");

  // Steps the parts of all workers, each from its own gradients in the context, and waits. The
  // first error, by worker; kNotFound for a worker that has no part.
  absl::Status Step(const Context& context);

 private:
  Worker* const worker_;
  const std::string function_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_OPTIMIZER_H_
