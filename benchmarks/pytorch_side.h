// PyTorch's own RPC agent and distributed autograd, from the same libtorch, driven from C++.
#ifndef DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_
#define DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "benchmarks/work.h"

namespace distgrad {

// Creates the side. `place.config`: "default", which leaves the choice to its agent (shared memory
// with CMA within a machine), or "uv" (TCP with its basic channel). Once in a process.
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartPytorch(const SideOptions& place);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_
