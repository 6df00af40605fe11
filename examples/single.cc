#include "examples/single.h"

#include "c10/core/GradMode.h"

namespace distgrad {

SingleLearner::SingleLearner(uint64_t seed)
    : model_(*Stage::Create(0, 1, seed)), optimizer_(model_.parameters(), kMomentum) {}

absl::StatusOr<double> SingleLearner::Step(const Batch& batch, double learning_rate) {
  const at::Tensor loss = Loss(model_.Forward(batch.images), batch.labels);
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model_.parameters()) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad().reset();
  }
  optimizer_.Step(gradients, learning_rate);
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> SingleLearner::Predict(const at::Tensor& images) {
  const c10::NoGradGuard no_grad;
  return model_.Forward(images);
}

}  // namespace distgrad
