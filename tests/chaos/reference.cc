// Trains as the job does, layer after layer.
#include "tests/chaos/reference.h"

#include <ATen/Parallel.h>

#include "tests/chaos/model.h"

namespace distgrad {

struct ChaosReference::Model {
  std::vector<ChaosLayer> layers;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
};

ChaosReference::ChaosReference(int workers) : model_(std::make_unique<Model>()) {
  at::set_num_threads(1);  // as the workers do
  for (int rank = 0; rank < workers; ++rank) {
    model_->layers.emplace_back(rank);
    model_->optimizers.push_back(OptimizerOf(rank, model_->layers.back()));
  }
}

ChaosReference::~ChaosReference() = default;

void ChaosReference::TrainTo(int64_t steps) {
  while (this->steps() < steps) {
    const ChaosBatch batch = BatchOf(this->steps());
    at::Tensor x = batch.input;
    for (const ChaosLayer& layer : model_->layers) x = layer.Forward(x);
    const at::Tensor loss = LossOf(x, batch);
    for (const auto& optimizer : model_->optimizers) optimizer->zero_grad();
    loss.backward();
    for (const auto& optimizer : model_->optimizers) optimizer->step();
    losses_.push_back(BitsOf(loss));
  }
}

std::vector<uint32_t> ChaosReference::Checksums() const {
  std::vector<uint32_t> sums;
  for (const ChaosLayer& layer : model_->layers) sums.push_back(layer.Checksum());
  return sums;
}

}  // namespace distgrad
