// Makes layers, runs them, and measures their steps.
#include "benchmarks/split_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr int kHeads = 4;
constexpr double kRate = 0.01;

at::Tensor Parameter(at::IntArrayRef sizes) {
  return (at::randn(sizes) * 0.05).requires_grad_(true);
}

}  // namespace

const char* SplitJob::Unit() const {
  if (model == Model::kImages) return "images";
  return model == Model::kTransformer ? "tokens" : "samples";
}

at::Tensor SplitJob::Inputs() const {
  if (model == Model::kImages) return at::randn({batch, 1, 28, 28});
  return model == Model::kTransformer ? at::randn({batch, sequence, width})
                                      : at::randn({batch, width});
}

at::Tensor SplitJob::Targets() const {
  return model == Model::kImages ? at::randint(10, {batch}, at::kLong) : Inputs();
}

at::Tensor SplitJob::Loss(const at::Tensor& outputs, const at::Tensor& targets) const {
  return model == Model::kImages ? distgrad::Loss(outputs, targets)
                                 : at::mse_loss(outputs, targets);
}

SplitPart::SplitPart(const SplitJob& job, int index, int count)
    : model_(job.model), width_(job.width) {
  if (model_ == SplitJob::Model::kImages) {
    stage_ = ValueOrThrow(Stage::Create(index, count, /*seed=*/1));
    return;
  }
  for (int i = 0; i < job.layers / count; ++i) {
    if (model_ == SplitJob::Model::kLinear) {
      weights_.push_back({Parameter({width_, width_})});
      continue;
    }
    weights_.push_back({Parameter({3 * width_, width_}), Parameter({width_, width_}),
                        Parameter({4 * width_, width_}), Parameter({width_, 4 * width_})});
  }
}

std::vector<at::Tensor> SplitPart::Forward(std::vector<at::Tensor> in) const {
  at::Tensor x = std::move(in[0]);
  if (stage_.has_value()) return {stage_->Forward(x)};
  for (const std::vector<at::Tensor>& layer : weights_) {
    x = model_ == SplitJob::Model::kTransformer ? Block(x, layer)
                                                : at::relu(at::linear(x, layer[0]));
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
  if (stage_.has_value()) return stage_->parameters();
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
