// What the job of the chaos trains: a network with a layer on each worker, on data that a step's
// number gives. Each step's loss is the same to the last bit wherever it is computed, so that a
// process alone can say what the job has to get.
#ifndef DISTGRAD_TESTS_CHAOS_MODEL_H_
#define DISTGRAD_TESTS_CHAOS_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>

namespace distgrad {

// float32 [32, 16], both.
struct ChaosBatch {
  at::Tensor input;
  at::Tensor target;
};
ChaosBatch BatchOf(int64_t step);

// x + tanh(x first) second. The hidden activation, of 128 KB, comes from the system anew each time,
// so that a process without memory is one that has none for it.
struct ChaosLayer {
  explicit ChaosLayer(int rank);
  at::Tensor Forward(const at::Tensor& x) const;
  // Of all its bits.
  uint32_t Checksum() const;

  at::Tensor first;   // float32 [16, 1024]
  at::Tensor second;  // float32 [1024, 16]
};

// SGD with momentum for even ranks, and Adam for odd ones: both have a state that a worker which
// comes back must have back.
std::unique_ptr<torch::optim::Optimizer> OptimizerOf(int rank, const ChaosLayer& layer);

at::Tensor LossOf(const at::Tensor& output, const ChaosBatch& batch);
// To be compared bit by bit.
uint32_t BitsOf(const at::Tensor& loss);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_MODEL_H_
