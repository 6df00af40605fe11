// Makes the nodes at which gradients enter a graph.
#include "core/autograd/executor/source_node.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace distgrad {

using torch::autograd::variable_list;

SourceNode::SourceNode(absl::Span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      add_input_metadata(undefined_input());
      add_next_edge({});
      continue;
    }
    add_input_metadata(tensor);
    add_next_edge(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                         : torch::autograd::Edge());
  }
}

variable_list SourceNode::apply(variable_list&& gradients) { return std::move(gradients); }

std::string SourceNode::name() const { return "distgrad::SourceNode"; }

std::shared_ptr<SourceNode> MakeSourceNode(absl::Span<const at::Tensor> tensors) {
  return std::shared_ptr<SourceNode>(new SourceNode(tensors), torch::autograd::deleteNode);
}

}  // namespace distgrad
