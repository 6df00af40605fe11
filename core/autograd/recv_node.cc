// Attaches recv nodes to tensors that have arrived, and sends back what reaches them.
#include "core/autograd/recv_node.h"

#include <torch/csrc/autograd/variable.h>

#include "absl/strings/str_cat.h"

namespace distgrad {

RecvNodes RecvNode::Attach(ContextId context, ContextHolder holder, EdgeEnd end,
                           absl::Span<at::Tensor> tensors) {
  RecvNodes nodes;
  nodes.reserve(tensors.size());
  for (at::Tensor& tensor : tensors) {
    // deleteNode frees a long chain of nodes without recursion.
    const std::shared_ptr<RecvNode>& node =
        nodes.emplace_back(new RecvNode(context, holder, end, nodes.size(), tensors.size()),
                           torch::autograd::deleteNode);
    const uint32_t input = node->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge(node, input));
  }
  return nodes;
}

torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&& gradients) {
  TORCH_CHECK(false, "the graph leads to a tensor received from worker ", end_.peer, " in context ",
              absl::StrCat(context_), ": use the backward of that context, not torch's");
}

std::string RecvNode::name() const { return absl::StrCat("RecvNode(from worker ", end_.peer, ")"); }

}  // namespace distgrad
