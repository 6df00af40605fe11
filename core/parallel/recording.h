// The parts that hand-made nodes of the graph share.
#ifndef DISTGRAD_CORE_PARALLEL_RECORDING_H_
#define DISTGRAD_CORE_PARALLEL_RECORDING_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "absl/types/span.h"

namespace distgrad {

inline bool NeedsGradient(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

inline bool AnyNeedsGradient(absl::Span<const at::Tensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& tensor : tensors) {
    if (NeedsGradient(tensor)) return true;
  }
  return false;
}

// Returns the edges to where the gradients of `inputs` go; none for those that need none.
inline torch::autograd::edge_list EdgesOf(absl::Span<const at::Tensor> inputs) {
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    edges.push_back(NeedsGradient(input) ? torch::autograd::impl::gradient_edge(input)
                                         : torch::autograd::Edge());
  }
  return edges;
}

// Makes `output` the next output of the operation that `node` is the backward of; where
// `differentiable` is false the output only takes its number.
inline void AddOutput(const std::shared_ptr<torch::autograd::Node>& node, const at::Tensor& output,
                      bool differentiable) {
  if (!differentiable) {
    node->add_input_metadata(torch::autograd::Node::undefined_input());
    return;
  }
  const uint32_t number = node->add_input_metadata(output);
  torch::autograd::impl::set_gradient_edge(output, {node, number});
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_RECORDING_H_
