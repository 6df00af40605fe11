// The node by which gradients enter a graph: it hands its inputs on to the gradient edges of the
// tensors it was made for, and to which no edge leads.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_SOURCE_NODE_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_SOURCE_NODE_H_

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace distgrad {

// Immutable after construction.
class SourceNode : public torch::autograd::Node {
 public:
  // Has one input per tensor, in their order. A tensor that is undefined or requires no grad keeps
  // its place, and what is fed for it goes nowhere.
  explicit SourceNode(absl::Span<const at::Tensor> tensors);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override;
};

// Makes a SourceNode whose graph, however long, is freed without recursion.
std::shared_ptr<SourceNode> MakeSourceNode(absl::Span<const at::Tensor> tensors);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_SOURCE_NODE_H_
