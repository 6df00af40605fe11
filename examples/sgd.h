// Stochastic gradient descent with momentum.
#ifndef DISTGRAD_EXAMPLES_SGD_H_
#define DISTGRAD_EXAMPLES_SGD_H_

#include <vector>

#include "ATen/core/Tensor.h"

namespace distgrad {

// v = momentum * v + gradient;  parameter -= learning_rate * v. For one thread.
class Sgd {
 public:
  Sgd(std::vector<at::Tensor> parameters, double momentum);

  // `gradients` in the order of the parameters; an undefined one leaves its parameter alone.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate);

 private:
  // Constant after construction.
  const std::vector<at::Tensor> parameters_;
  const double momentum_;

  std::vector<at::Tensor> velocities_;  // undefined before a parameter's first gradient
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_SGD_H_
