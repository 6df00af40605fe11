// The training run on a text, wherever the model is; and what the model then writes.
#ifndef DISTGRAD_EXAMPLES_TEXT_TRAINING_H_
#define DISTGRAD_EXAMPLES_TEXT_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/options.h"
#include "examples/stepper.h"
#include "examples/text.h"
#include "examples/training_loop.h"
#include "examples/transformer_options.h"

namespace distgrad {

// A model that learns a text, wherever its parameters are. For one thread.
class TextLearner : public Stepper<TextBatch> {
 public:
  // Returns the scores of the next tokens, float [n, length, tokens], behind each of int64
  // [n, length]; records no gradient. `n` is at least TransformerOptions::micro_batches.
  virtual absl::StatusOr<at::Tensor> Predict(const at::Tensor& tokens) = 0;

  // Whether to end between two steps, as after Ctrl-C.
  virtual bool interrupted() const;
};

// A training run of one process. For one thread.
class TextTraining {
 public:
  using Role = TrainingLoop::Role;
  using Save = TrainingLoop::Save;

  // kInvalidArgument if the text is too short for the context.
  static absl::Status CheckText(const TransformerOptions& own, const Text& text);

  // The text must outlive it.
  static absl::StatusOr<std::unique_ptr<TextTraining>> Create(const Options& options,
                                                              const TransformerOptions& own,
                                                              const Text* text,
                                                              Role role = Role::kLead);

  // Goes on where so many steps were taken, with a learner that has taken them. Before Run().
  absl::Status Resume(int64_t steps) { return loop_.Resume(steps); }

  // Trains; with kLead it also has the model write sample.txt, and prints the results. Else as
  // Training::Run().
  absl::Status Run(TextLearner& learner, const Save& save = nullptr);

 private:
  class Task;

  TextTraining(const Options& options, const TransformerOptions& own, const Text* text,
               TrainingLoop loop);

  absl::Status WriteSample(TextLearner& learner, const std::string& path);

  // Constant after construction.
  const Options options_;
  const TransformerOptions own_;
  const Text* const text_;

  TrainingLoop loop_;
};

// Has the model write `n` texts of so many tokens, int64 [n, length], each from `first` on, by
// drawing every token with the probability that the model gives it, sharpened a little.
absl::StatusOr<at::Tensor> WriteText(TextLearner& learner, int64_t first, int64_t n, int64_t length,
                                     int64_t context, uint64_t seed);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TEXT_TRAINING_H_
