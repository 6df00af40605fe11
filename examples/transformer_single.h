// Training the transformer in one process, with plain libtorch and no distgrad, for comparison.
#ifndef DISTGRAD_EXAMPLES_TRANSFORMER_SINGLE_H_
#define DISTGRAD_EXAMPLES_TRANSFORMER_SINGLE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "examples/text_training.h"
#include "examples/transformer_stage.h"

namespace torch::optim {
class AdamW;
}

namespace distgrad {

// Trains all blocks in this process, each batch in micro-batches, as a pipeline does. For one
// thread.
class SingleTextLearner : public TextLearner {
 public:
  static absl::StatusOr<std::unique_ptr<SingleTextLearner>> Create(const TransformerShape& shape,
                                                                   int micro_batches,
                                                                   uint64_t seed);
  ~SingleTextLearner() override;

  absl::StatusOr<double> Step(const TextBatch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& tokens) override;

 private:
  SingleTextLearner(TransformerStage model, int micro_batches);

  const TransformerStage model_;
  const int micro_batches_;
  const std::unique_ptr<torch::optim::AdamW> optimizer_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRANSFORMER_SINGLE_H_
