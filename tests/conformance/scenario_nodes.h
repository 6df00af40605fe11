// Custom autograd functions of the scenarios, and the parameters of their workers.
#ifndef DISTGRAD_TESTS_CONFORMANCE_SCENARIO_NODES_H_
#define DISTGRAD_TESTS_CONFORMANCE_SCENARIO_NODES_H_

#include <ATen/ops/sin.h>
#include <torch/csrc/autograd/custom_function.h>

namespace distgrad {

// Hands its input on, and runs Derived::Backward() before its gradient goes on.
template <typename Derived>
struct SameForward : torch::autograd::Function<Derived> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    Derived::Backward();
    return gradients;
  }
};

// sin(sin(x)), computed again in backward, by a backward of its own.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.sin().sin();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode on(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    x.sin().sin().backward(gradients[0]);
    return {x.grad()};
  }
};

// A parameter of a worker; every process has them all, to compute what is expected.
at::Tensor ParameterOf(int rank);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CONFORMANCE_SCENARIO_NODES_H_
