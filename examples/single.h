// Training in one process, with plain libtorch and no distgrad: what the workers are compared
// with.
#ifndef DISTGRAD_EXAMPLES_SINGLE_H_
#define DISTGRAD_EXAMPLES_SINGLE_H_

#include "examples/model.h"
#include "examples/sgd.h"
#include "examples/training.h"

namespace distgrad {

// The whole network in this process. For one thread.
class SingleLearner : public Learner {
 public:
  explicit SingleLearner(uint64_t seed);

  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

  const std::vector<at::Tensor>& parameters() const { return model_.parameters(); }

 private:
  const Stage model_;
  Sgd optimizer_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_SINGLE_H_
