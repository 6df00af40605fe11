// Ranks that train one model together, each on its part of a batch.
#ifndef DISTGRAD_BENCHMARKS_RANK_SIDE_H_
#define DISTGRAD_BENCHMARKS_RANK_SIDE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "benchmarks/work.h"

namespace distgrad {

// Creates the side. All ranks do the work of rank 0, at the same time.
absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartRank(const SideOptions& place);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_RANK_SIDE_H_
