// The benchmark's side that runs distgrad, as a program uses it.
#ifndef DISTGRAD_BENCHMARKS_DISTGRAD_SIDE_H_
#define DISTGRAD_BENCHMARKS_DISTGRAD_SIDE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "benchmarks/work.h"

namespace distgrad {

// Creates the side. `place.config` is the worker's transport. With "inproc" all workers are in one
// process: `rank` must be 0.
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartDistgrad(const SideOptions& place);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_DISTGRAD_SIDE_H_
