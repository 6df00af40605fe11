// Where tensors that came from another worker enter the local graph. In backward a gradient that
// reaches this node is sent to the send node at the other end of its edge.
#ifndef DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_
#define DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <typeinfo>

#include "absl/types/span.h"
#include "core/autograd/pass.h"
#include "core/base/ids.h"

namespace distgrad {

// Immutable after construction.
class RecvNode final : public torch::autograd::Node {
 public:
  // Makes the node and sets it as the history of `tensors` (each defined, floating or complex,
  // without history), whose gradients it will take in their order.
  static std::shared_ptr<RecvNode> Attach(ContextId context, EdgeEnd end,
                                          absl::Span<at::Tensor> tensors);

  static bool Is(const torch::autograd::Node& node) { return typeid(node) == typeid(RecvNode); }

  ContextId context() const { return context_; }
  EdgeEnd end() const { return end_; }

  // Throws: only our own engine can follow the edge to the other worker.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override;

 private:
  RecvNode(ContextId context, EdgeEnd end) : context_(context), end_(end) {}

  const ContextId context_;
  const EdgeEnd end_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_
