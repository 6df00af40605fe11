// Makes an averager of a module, with the names, buffers and sparse gradients of that.
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>
#include <utility>

#include "core/parallel/process_group/gradient_averager.h"

namespace distgrad {
namespace {

// The weights of embeddings whose gradients are sparse.
std::unordered_set<const void*> SparseGradients(const torch::nn::Module& module) {
  std::unordered_set<const void*> weights;
  const auto add = [&weights](const torch::nn::Module& each) {
    if (const auto* embedding = each.as<torch::nn::EmbeddingImpl>()) {
      if (embedding->options.sparse()) weights.insert(embedding->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = each.as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) weights.insert(bag->weight.unsafeGetTensorImpl());
    }
  };
  add(module);
  for (const auto& each : module.modules(/*include_self=*/false)) add(*each);
  return weights;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradientAverager>> GradientAverager::Create(
    std::shared_ptr<ProcessGroup> group, const torch::nn::Module& module,
    GradientAveragerOptions options) {
  const std::unordered_set<const void*> sparse = SparseGradients(module);
  std::vector<NamedTensor> parameters, buffers;
  for (const auto& item : module.named_parameters()) {
    parameters.push_back(
        {item.key(), item.value(), sparse.count(item.value().unsafeGetTensorImpl()) > 0});
  }
  for (const auto& item : module.named_buffers()) buffers.push_back({item.key(), item.value()});
  return Create(std::move(group), std::move(parameters), std::move(buffers), options);
}

}  // namespace distgrad
