// A step of training on the CPU, by the module alone or by DataParallel over some replicas.
#ifndef DISTGRAD_BENCHMARKS_PARALLEL_STEP_H_
#define DISTGRAD_BENCHMARKS_PARALLEL_STEP_H_

#include <torch/nn/modules/container/sequential.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "benchmarks/work.h"

namespace distgrad {

struct Layers {
  torch::nn::Sequential net;
  at::Tensor input;
};
// The layers and the batch of a kind of work, by the end of its name: "_small", "_many" (layers),
// "_large" or "_tall" (large ones, and more rows). If `parts` ranks share the batch, it is the part
// of one.
Layers NewLayers(const std::string& kind, int parts = 1);

// step_...: forward and backward of a batch. parallel_...: the same over work.count replicas on the
// CPU. kInternal if the gradients are not those of the module.
absl::StatusOr<Sample> RunParallelStep(const Work& work, absl::Duration budget);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_PARALLEL_STEP_H_
