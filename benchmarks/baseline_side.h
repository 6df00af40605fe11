// The baselines: bytes to another process and back, with nothing around them.
#ifndef DISTGRAD_BENCHMARKS_BASELINE_SIDE_H_
#define DISTGRAD_BENCHMARKS_BASELINE_SIDE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "benchmarks/work.h"

namespace distgrad {

// `place.config`: "unix" or "tcp" for blocking sockets; "uv", "shm", "uv+cma", "shm+cma" for raw
// TensorPipe, with the bytes in the message itself or, with "+cma", as a tensor. `place.world`
// is 2; the process of rank 1 echoes.
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartSockets(const SideOptions& place);
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartTensorPipe(const SideOptions& place);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_BASELINE_SIDE_H_
