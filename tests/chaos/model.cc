// The arithmetic.
#include "tests/chaos/model.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <cstring>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/base/crc32c.h"

namespace distgrad {
namespace {

constexpr int64_t kRows = 32, kWidth = 16, kHidden = 1024;

at::Tensor Waves(int64_t rows, int64_t columns, double frequency, double size) {
  return at::sin(at::arange(rows * columns, at::kFloat).mul_(frequency))
      .mul_(size)
      .view({rows, columns});
}

}  // namespace

ChaosBatch BatchOf(int64_t step) {
  const double frequency = 0.1 + 0.01 * static_cast<double>(step % 97);
  const at::Tensor input = Waves(kRows, kWidth, frequency, 1);
  return {input, at::sin(input * 3)};
}

ChaosLayer::ChaosLayer(int rank)
    : first(Waves(kWidth, kHidden, 1.3 + 0.1 * rank, 0.2).requires_grad_()),
      second(Waves(kHidden, kWidth, 2.1 + 0.1 * rank, 0.02).requires_grad_()) {}

at::Tensor ChaosLayer::Forward(const at::Tensor& x) const {
  return at::add(x, at::mm(at::tanh(at::mm(x, first)), second));
}

uint32_t ChaosLayer::Checksum() const {
  uint32_t sum = 0;
  for (const at::Tensor& tensor : {first, second}) {
    sum = Crc32c({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()}, sum);
  }
  return sum;
}

std::unique_ptr<torch::optim::Optimizer> OptimizerOf(int rank, const ChaosLayer& layer) {
  const std::vector<at::Tensor> parameters = {layer.first, layer.second};
  if (rank % 2 == 0) {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.01).momentum(0.9));
  }
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.001));
}

at::Tensor LossOf(const at::Tensor& output, const ChaosBatch& batch) {
  return at::mse_loss(output, batch.target);
}

uint32_t BitsOf(const at::Tensor& loss) {
  const float value = loss.item<float>();
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace distgrad
