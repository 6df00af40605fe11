#include "examples/sgd.h"

#include <utility>

#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"

namespace distgrad {

Sgd::Sgd(std::vector<at::Tensor> parameters, double momentum)
    : parameters_(std::move(parameters)), momentum_(momentum), velocities_(parameters_.size()) {}

void Sgd::Step(const std::vector<at::Tensor>& gradients, double learning_rate) {
  TORCH_CHECK(gradients.size() == parameters_.size(), gradients.size(), " gradients for ",
              parameters_.size(), " parameters");
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    at::Tensor& velocity = velocities_[i];
    if (velocity.defined()) {
      velocity.mul_(momentum_).add_(gradients[i]);
    } else {
      velocity = gradients[i].clone();
    }
    parameters_[i].add_(velocity, -learning_rate);
  }
}

}  // namespace distgrad
