// Waits for GPUs, and memory of theirs, beside CUDA graphs that other threads capture.
#ifndef DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_
#define DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_

#include "absl/functional/function_ref.h"

namespace distgrad {

// Calls `run`, which asks GPUs for something, on this thread. Without this CUDA would refuse
// allocations, queries and waits while any other thread captures a graph in the mode "global",
// which is PyTorch's default, and end that capture too. Only for where CUDA has a GPU; in a build
// without CUDA it just calls `run`.
void OutsideOfCaptures(absl::FunctionRef<void()> run);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_
