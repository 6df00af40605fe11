// Whether running a graph takes less time than having another thread do it.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_CHEAP_GRAPH_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_CHEAP_GRAPH_H_

#include <torch/csrc/autograd/function.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace distgrad {

// Returns true if all that can be reached from `roots` is at most a few dozen nodes, on the CPU,
// each of libtorch's own or a stop, with inputs of at most a few KiB, and none with a hook. So no
// function of a user runs there (but for a hook on a saved tensor, which cannot be seen from
// outside). Traverses no more nodes than that. `is_stop` as for Graph.
bool CheapToRunInline(absl::Span<const std::shared_ptr<torch::autograd::Node>> roots,
                      absl::FunctionRef<bool(torch::autograd::Node&)> is_stop);

// Whether the node may keep the thread that runs it for long: unless it is libtorch's own, without
// a hook, and what it takes and gives is at most a few KiB on the CPU, or anything on an
// accelerator, for which it only launches. A stop does only if it has a hook.
bool MayTakeLong(torch::autograd::Node& node, bool is_stop);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_CHEAP_GRAPH_H_
