// One node of a graph, called as libtorch's engine calls it: its hooks, its apply, the checks.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_CALLS_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_CALLS_H_

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

#include "absl/functional/function_ref.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace distgrad {

// All of these throw what a node or a hook throws. `reuse` says whether the memory of a gradient
// that nothing else holds may be written again; see Graph::one_stream_per_device.

// Runs the hooks of a node at which gradients leave the graph, in place of the node itself: what
// the hooks before it leave is what it hands on, and what the hooks after it may change.
torch::autograd::variable_list CallStop(torch::autograd::Node& node,
                                        torch::autograd::variable_list gradients);

// Runs a node with all its hooks. Returns one gradient for each of its edges.
torch::autograd::variable_list CallOperator(torch::autograd::Node& node,
                                            torch::autograd::variable_list gradients,
                                            bool retain_graph);

// Runs a leaf's hooks, and between them `accumulate`, if there is anything to accumulate; that
// calls the post-accumulate hook (post_accumulate.h).
void CallLeaf(torch::autograd::AccumulateGrad& leaf, torch::autograd::variable_list gradients,
              bool reuse, absl::FunctionRef<void(at::Tensor)> accumulate);

// Returns the sum of two gradients for an input of `consumer`, as libtorch adds them up; on
// `stream` if they are on an accelerator.
at::Tensor AddGradients(torch::autograd::Node& consumer, at::Tensor held, at::Tensor gradient,
                        std::optional<c10::Stream> stream, bool reuse);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_CALLS_H_
