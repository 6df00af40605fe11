// Makes the parameters of a stage from a seed, and runs its blocks.
#include "examples/transformer_stage.h"

#include <cmath>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/argmax.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/layer_norm.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/scaled_dot_product_attention.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "torch/optim/adamw.h"

namespace distgrad {
namespace {

// Of all first weights; those that add to what a block was given have less, so that the sum of all
// blocks does not grow with their number (Radford et al., 2019).
constexpr double kDeviation = 0.02;

}  // namespace

absl::StatusOr<TransformerStage> TransformerStage::Create(const TransformerShape& shape, int index,
                                                          int count, uint64_t seed) {
  if (count < 1 || count > shape.blocks) {
    return absl::InvalidArgumentError(absl::StrCat(shape.blocks, " blocks can be cut into 1 to ",
                                                   shape.blocks, " stages, not ", count));
  }
  if (index < 0 || index >= count) {
    return absl::InvalidArgumentError(absl::StrCat("there is no stage ", index, " of ", count));
  }
  if (shape.heads < 1 || shape.width % shape.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a width of ", shape.width, " cannot have ", shape.heads, " heads"));
  }
  return TransformerStage(shape, shape.blocks * index / count, shape.blocks * (index + 1) / count,
                          seed);
}

TransformerStage::TransformerStage(const TransformerShape& shape, int begin, int end, uint64_t seed)
    : shape_(shape) {
  const int64_t width = shape.width;
  // A generator for each part, so that a stage need not make those before it.
  at::Generator generator;
  const auto seed_part = [&](int part) {
    generator = at::detail::createCPUGenerator(seed * (shape.blocks + 2) + part);
  };
  const auto weight = [&](const std::string& name, at::IntArrayRef sizes, double deviation) {
    at::Tensor tensor = at::empty(sizes);
    tensor.normal_(0, deviation, generator).requires_grad_();
    return named_[name] = tensor;
  };
  const auto norm = [&](const std::string& name) {
    return named_[name] = at::ones({width}).requires_grad_();
  };

  if (begin == 0) {
    seed_part(0);
    token_embedding_ = weight("tokens", {shape.tokens, width}, kDeviation);
    place_embedding_ = weight("places", {shape.context, width}, kDeviation);
  }
  const double added = kDeviation / std::sqrt(2 * shape.blocks);
  for (int i = begin; i < end; ++i) {
    seed_part(1 + i);
    const std::string name = absl::StrCat("block", i, ".");
    blocks_.push_back({.attention_norm = norm(name + "attention_norm"),
                       .attention = weight(name + "attention", {3 * width, width}, kDeviation),
                       .attention_out = weight(name + "attention_out", {width, width}, added),
                       .hidden_norm = norm(name + "hidden_norm"),
                       .hidden = weight(name + "hidden", {4 * width, width}, kDeviation),
                       .hidden_out = weight(name + "hidden_out", {width, 4 * width}, added)});
  }
  if (end == shape.blocks) {
    seed_part(1 + shape.blocks);
    scores_norm_ = norm("scores_norm");
    scores_ = weight("scores", {shape.tokens, width}, kDeviation);
  }
}

at::Tensor TransformerStage::Forward(at::Tensor x) const {
  if (token_embedding_.defined()) {
    x = at::embedding(token_embedding_, x) + place_embedding_.slice(0, 0, x.size(1));
  }
  for (const Block& block : blocks_) x = Run(block, x);
  if (!scores_.defined()) return x;
  return at::linear(at::layer_norm(x, {shape_.width}, scores_norm_), scores_);
}

at::Tensor TransformerStage::Run(const Block& block, const at::Tensor& x) const {
  const int64_t n = x.size(0), length = x.size(1), width = shape_.width;
  // Queries, keys and values, each [n, heads, length, width / heads].
  const at::Tensor qkv =
      at::linear(at::layer_norm(x, {width}, block.attention_norm), block.attention)
          .view({n, length, 3, shape_.heads, width / shape_.heads})
          .permute({2, 0, 3, 1, 4});
  const at::Tensor seen = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0,
                                                           /*is_causal=*/true)
                              .transpose(1, 2)
                              .reshape({n, length, width});
  const at::Tensor y = x + at::linear(seen, block.attention_out);
  const at::Tensor hidden = at::linear(at::layer_norm(y, {width}, block.hidden_norm), block.hidden);
  return y + at::linear(at::gelu(hidden), block.hidden_out);
}

at::Tensor TextLoss(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.flatten(0, 1), targets.flatten());
}

double TextAccuracy(const at::Tensor& scores, const at::Tensor& targets) {
  const auto right = at::argmax(scores, -1).eq(targets).sum().item<int64_t>();
  return static_cast<double>(right) / static_cast<double>(targets.numel());
}

std::unique_ptr<torch::optim::AdamW> MakeTextOptimizer(
    const std::map<std::string, at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor] : parameters) all.push_back(tensor);
  return std::make_unique<torch::optim::AdamW>(
      std::move(all), torch::optim::AdamWOptions(/*lr=*/0).betas({0.9, 0.95}).weight_decay(0.1));
}

}  // namespace distgrad
