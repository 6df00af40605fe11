// PyTorch's own RPC agent and distributed autograd, from the same libtorch, driven from C++.
#ifndef DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_
#define DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "benchmarks/split_model.h"
#include "benchmarks/work.h"

namespace distgrad {

// Creates the side. `place.config`: "default", which leaves the choice to its agent (shared memory
// with CMA within a machine), or "uv" (TCP with its basic channel). Once in a process.
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartPytorch(const SideOptions& place);

// Trains a model that is split over the processes: a step is a forward of the batch, cut into some
// parts that are all on their way at once, from process to process, one backward by the distributed
// autograd, and each process's own parameters minus their gradients. Of rank 0 as MeasureSplit();
// the others serve until that is over. Once in a process, and not beside StartPytorch().
absl::Status TrainWithPytorch(const SplitJob& job, int parts, const SideOptions& place, int rounds,
                              std::vector<double>* said);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_PYTORCH_SIDE_H_
