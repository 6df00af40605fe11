// Takes steps of AdamW on the whole transformer.
#include "examples/transformer_single.h"

#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/full_like.h"
#include "c10/core/GradMode.h"
#include "torch/optim/adamw.h"

namespace distgrad {

absl::StatusOr<std::unique_ptr<SingleTextLearner>> SingleTextLearner::Create(
    const TransformerShape& shape, int micro_batches, uint64_t seed) {
  absl::StatusOr<TransformerStage> model = TransformerStage::Create(shape, 0, 1, seed);
  if (!model.ok()) return model.status();
  return std::unique_ptr<SingleTextLearner>(
      new SingleTextLearner(*std::move(model), micro_batches));
}

SingleTextLearner::SingleTextLearner(TransformerStage model, int micro_batches)
    : model_(std::move(model)),
      micro_batches_(micro_batches),
      optimizer_(MakeTextOptimizer(model_.named_parameters())) {}

SingleTextLearner::~SingleTextLearner() = default;

absl::StatusOr<double> SingleTextLearner::Step(const TextBatch& batch, double learning_rate) {
  optimizer_->zero_grad();
  const std::vector<at::Tensor> inputs = batch.inputs.tensor_split(micro_batches_);
  const std::vector<at::Tensor> targets = batch.targets.tensor_split(micro_batches_);
  double mean = 0;
  for (int m = 0; m < micro_batches_; ++m) {
    const double part =
        static_cast<double>(inputs[m].numel()) / static_cast<double>(batch.inputs.numel());
    const at::Tensor loss = TextLoss(model_.Forward(inputs[m]), targets[m]);
    loss.backward(at::full_like(loss, part));
    mean += part * loss.item<double>();
  }
  optimizer_->param_groups()[0].options().set_lr(learning_rate);
  optimizer_->step();
  return mean;
}

absl::StatusOr<at::Tensor> SingleTextLearner::Predict(const at::Tensor& tokens) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> scores;
  for (const at::Tensor& part : tokens.tensor_split(micro_batches_)) {
    scores.push_back(model_.Forward(part));
  }
  return at::cat(scores);
}

}  // namespace distgrad
