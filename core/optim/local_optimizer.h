// Steps one of libtorch's optimizers from the gradients of a context.
//
//   LocalOptimizer optimizer(std::make_unique<torch::optim::SGD>(parameters, 0.1));
//   absl::Status done = optimizer.Step(*context.record());
#ifndef DISTGRAD_CORE_OPTIM_LOCAL_OPTIMIZER_H_
#define DISTGRAD_CORE_OPTIM_LOCAL_OPTIMIZER_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/context_record.h"
#include "core/optim/optimizer_state.h"

namespace torch::optim {
class Optimizer;
}

namespace distgrad {

// Returns kFailedPrecondition on a thread that is in a post-accumulate hook, under the mutex of its
// leaf: a step of that leaf, on any thread, would wait for the hook, and the hook for the step.
absl::Status CheckMayAwaitStep();

// Thread-safe: steps of several contexts go one after the other, also those of other optimizers
// of this process that hold some of the same parameters.
class LocalOptimizer {
 public:
  explicit LocalOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer);
  ~LocalOptimizer();

  // Updates every parameter that has a gradient in the context; the others are left alone. Each
  // parameter's .grad is used while the optimizer runs, and is afterwards what it was before.
  // `learning_rate`, if given, is set first, for all parameters. kFailedPrecondition, as of the two
  // below, once the context is released, and where CheckMayAwaitStep() fails: then nothing has
  // changed.
  absl::Status Step(const ContextRecord& context,
                    std::optional<double> learning_rate = std::nullopt);

  // The state of the optimizer, and its replacement: see optimizer_state.h.
  absl::StatusOr<std::vector<StateTensor>> State();
  absl::Status LoadState(const std::vector<StateTensor>& state);

  // Calls `use` between two steps, and returns what that returns. Steps wait meanwhile.
  absl::Status Use(absl::FunctionRef<absl::Status(torch::optim::Optimizer&)> use);

  // Lets go of the optimizer and its parameters, once a step that runs is over. From then on
  // everything else is kNotFound. False if that has been done before.
  bool Remove();
  bool removed() const;

  // Sets the rate of all parameters, from the next step on. kInvalidArgument if it is negative or
  // not finite.
  absl::Status SetLearningRate(double learning_rate);

  // Returns the 2-norm of each gradient that counts in norms, as scalars on the CPU, in the order
  // of the parameters; none for a parameter without one, and one for a parameter that is there
  // twice.
  absl::StatusOr<std::vector<at::Tensor>> GradientNorms(const ContextRecord& context);
  // Multiplies every gradient by a scalar.
  absl::Status ScaleGradients(ContextRecord& context, const at::Tensor& factor);

 private:
  std::atomic<bool> removed_{false};

  absl::Mutex mu_;  // held while torch runs: parameters change under it
  // The optimizer; null once it is removed.
  std::unique_ptr<torch::optim::Optimizer> optimizer_ ABSL_GUARDED_BY(mu_) ABSL_PT_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_OPTIM_LOCAL_OPTIMIZER_H_
