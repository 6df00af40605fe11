// The work that needs no peer: distgrad's executor, torch::autograd::backward, and memcpy.
#ifndef DISTGRAD_BENCHMARKS_LOCAL_SIDE_H_
#define DISTGRAD_BENCHMARKS_LOCAL_SIDE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "benchmarks/work.h"

namespace distgrad {

absl::StatusOr<std::unique_ptr<BenchmarkSide>> StartLocal(const SideOptions& place);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_LOCAL_SIDE_H_
