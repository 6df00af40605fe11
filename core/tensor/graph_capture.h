// Waits for GPUs, and memory of theirs, beside CUDA graphs that other threads capture.
#ifndef DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_
#define DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "absl/functional/function_ref.h"

namespace distgrad {

// Calls `run`, which asks GPUs for something, on this thread. Without this CUDA would refuse
// allocations, queries and waits while any other thread captures a graph in the mode "global",
// which is PyTorch's default, and end that capture too. Meanwhile `device`, one that `run` asks, is
// the current one: CUDA may make a context on that to change the mode. Only for where CUDA has a
// GPU; in a build without CUDA it just calls `run`.
void OutsideOfCaptures(c10::Device device, absl::FunctionRef<void()> run);

// Whether what is launched on a stream of CUDA's becomes a part of a graph, and does not run. Only
// for where CUDA has a GPU; throws what c10 throws.
bool IsCaptured(c10::Stream stream);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_GRAPH_CAPTURE_H_
