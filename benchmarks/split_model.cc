// Makes layers, runs them, and measures their steps.
#include "benchmarks/split_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr int kHeads = 4;
constexpr double kRate = 0.01;

at::Tensor Parameter(at::IntArrayRef sizes) {
  return (at::randn(sizes) * 0.05).requires_grad_(true);
}

}  // namespace

std::vector<int64_t> SplitJob::BatchSizes() const {
  if (transformer) return {batch, sequence, width};
  return {batch, width};
}

SplitPart::SplitPart(const SplitJob& job, int layers)
    : transformer_(job.transformer), width_(job.width) {
  for (int i = 0; i < layers; ++i) {
    if (!transformer_) {
      weights_.push_back({Parameter({width_, width_})});
      continue;
    }
    weights_.push_back({Parameter({3 * width_, width_}), Parameter({width_, width_}),
                        Parameter({4 * width_, width_}), Parameter({width_, 4 * width_})});
  }
}

std::vector<at::Tensor> SplitPart::Forward(std::vector<at::Tensor> in) const {
  at::Tensor x = std::move(in[0]);
  for (const std::vector<at::Tensor>& layer : weights_) {
    x = transformer_ ? Block(x, layer) : at::relu(at::linear(x, layer[0]));
  }
  return {x};
}

at::Tensor SplitPart::Block(const at::Tensor& x, const std::vector<at::Tensor>& layer) const {
  const int64_t n = x.size(0), t = x.size(1);
  const at::Tensor qkv = at::linear(at::layer_norm(x, {width_}), layer[0])
                             .view({n, t, 3, kHeads, width_ / kHeads})
                             .permute({2, 0, 3, 1, 4});
  const at::Tensor attention =
      at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true)
          .transpose(1, 2)
          .reshape({n, t, width_});
  const at::Tensor y = x + at::linear(attention, layer[1]);
  const at::Tensor hidden = at::gelu(at::linear(at::layer_norm(y, {width_}), layer[2]));
  return y + at::linear(hidden, layer[3]);
}

std::vector<at::Tensor> SplitPart::Parameters() const {
  std::vector<at::Tensor> all;
  for (const std::vector<at::Tensor>& layer : weights_) {
    all.insert(all.end(), layer.begin(), layer.end());
  }
  return all;
}

void SplitPart::Descend(
    const std::function<at::Tensor(const at::Tensor& parameter)>& gradient_of) const {
  const at::AutoGradMode grad_mode(false);
  for (at::Tensor parameter : Parameters()) parameter.sub_(gradient_of(parameter), kRate);
}

at::Tensor SplitLoss(std::vector<at::Tensor> outputs, std::vector<at::Tensor> targets) {
  return at::mse_loss(outputs[0], targets[0]);
}

absl::Status MeasureSplit(const SplitJob& job, int rounds, std::vector<double>* said,
                          const std::function<absl::Status()>& step) {
  for (int round = -1; round < rounds; ++round) {
    const absl::Time begin = absl::Now();
    for (int i = 0; i < job.steps; ++i) DG_RETURN_IF_ERROR(step());
    if (round < 0) continue;
    const double samples = job.batch * job.sequence * job.steps;
    said->push_back(samples / absl::ToDoubleSeconds(absl::Now() - begin));
  }
  return absl::OkStatus();
}

}  // namespace distgrad
