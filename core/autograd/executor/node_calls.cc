// Calls one node: hooks before, the node, the checks of its gradients, hooks behind.
#include "core/autograd/executor/node_calls.h"

#include <ATen/ops/_is_any_true.h>
#include <ATen/ops/isnan.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/autograd/executor/node_turn.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::AnomalyMode;
using torch::autograd::Node;
using torch::autograd::variable_list;

variable_list CallHooksBefore(Node& node, variable_list gradients) {
  for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
  if (!node.retains_grad_hooks().empty()) {
    // They read a tensor's .grad and write it, for which libtorch takes no lock: other passes may
    // have come to the node.
    const NodeTurn turn(node);
    for (const auto& [output, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
  }
  for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

void CheckCount(const variable_list& gradients, size_t expected) {
  TORCH_CHECK(gradients.size() == expected, "a hook changed the number of gradients to ",
              gradients.size(), " from ", expected);
}

// The gradient as the leaf's .grad would hold it: laid out like the leaf, and taken without a
// copy if `gradient` and the `other_owners` known here are all that hold it.
at::Tensor OwnedGradient(const AccumulateGrad& leaf, at::Tensor gradient, size_t other_owners) {
  at::Tensor owned;
  AccumulateGrad::accumulateGrad(leaf.variable, owned, gradient, 1 + other_owners,
                                 [&owned](at::Tensor&& result) { owned = std::move(result); });
  return owned;
}

void CheckNoNan(const variable_list& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined()) continue;
    const c10::OptionalDeviceGuard guard(outputs[i].device());
    TORCH_CHECK(!at::_is_any_true(at::isnan(outputs[i])).item<bool>(), "output ", i,
                " of the backward is nan");
  }
}

}  // namespace

variable_list CallStop(Node& node, variable_list gradients) {
  gradients = CallHooksBefore(node, std::move(gradients));
  CheckCount(gradients, node.num_inputs());
  if (node.post_hooks().empty()) return gradients;
  variable_list outputs = gradients;
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, gradients);
  CheckCount(outputs, node.num_inputs());
  return outputs;
}

variable_list CallOperator(Node& node, variable_list gradients, bool retain_graph) {
  gradients = CallHooksBefore(node, std::move(gradients));
  if (!retain_graph) node.will_release_variables();
  // Hooks after the node are shown what went in.
  const bool has_hooks = !node.post_hooks().empty();
  const variable_list inputs = has_hooks ? gradients : variable_list();
  std::optional<NodeTurn> turn(std::in_place, node);
  variable_list outputs = node(std::move(gradients));
  torch::autograd::validate_outputs(
      node.next_edges(), outputs, [&node](const std::string& message) {
        return absl::StrCat("Function ", node.name(), " returned an ", message);
      });
  if (has_hooks) {
    // They may wait for other passes that come to the node, whose mutex they do not need.
    turn.reset();
    for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, inputs);
    if (!retain_graph) turn.emplace(node);
  }
  CheckCount(outputs, node.num_outputs());
  if (!retain_graph) node.release_variables();
  turn.reset();
  if (AnomalyMode::is_enabled() && AnomalyMode::should_check_nan()) CheckNoNan(outputs);
  return outputs;
}

void CallLeaf(AccumulateGrad& leaf, variable_list gradients, bool reuse,
              absl::FunctionRef<void(at::Tensor)> accumulate) {
  gradients = CallHooksBefore(leaf, std::move(gradients));
  TORCH_CHECK(gradients.size() == 1, "expected 1 gradient, got ", gradients.size());
  // Hooks after the node are shown what went in.
  const variable_list inputs = leaf.post_hooks().empty() ? variable_list() : gradients;
  TORCH_CHECK(!gradients[0].defined() || leaf.variable.grad_fn() == nullptr,
              "leaf variable has been moved into the graph interior");
  if (gradients[0].defined() && leaf.variable.requires_grad()) {
    const at::Tensor kept = reuse ? at::Tensor() : gradients[0];  // a second owner: is copied
    // A statement of its own: the argument, which shares its memory, is gone after it.
    at::Tensor gradient = OwnedGradient(leaf, std::move(gradients[0]), inputs.size());
    accumulate(std::move(gradient));
  }
  variable_list outputs;
  for (const auto& hook : leaf.post_hooks()) outputs = (*hook)(outputs, inputs);
}

at::Tensor AddGradients(Node& consumer, at::Tensor held, at::Tensor gradient,
                        std::optional<c10::Stream> stream, bool reuse) {
  const c10::OptionalStreamGuard guard(stream);
  // Second owners keep the addition from being done in place.
  const variable_list kept = reuse ? variable_list() : variable_list{held, gradient};
  // libtorch's own buffer adds, so that its choice of in place or not, of the order of sparse and
  // dense, and so of the result's layout, is the same.
  torch::autograd::InputBuffer buffer(1);
  buffer.add(0, std::move(held), stream, stream, &consumer);
  buffer.add(0, std::move(gradient), stream, stream, &consumer);
  return std::move(buffer.buffer[0]);
}

}  // namespace distgrad
