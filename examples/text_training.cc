// Gives pieces of a text to a TextLearner, in the loop that all examples share, and writes with it.
#include "examples/text_training.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/multinomial.h"
#include "ATen/ops/softmax.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/interrupt.h"
#include "examples/transformer_stage.h"

namespace distgrad {
namespace {

constexpr int64_t kRounds = 10;
// How many batches of pieces of the test's text an evaluation has.
constexpr int64_t kTestBatches = 4;
// Of each text that the model writes.
constexpr int64_t kSampleLength = 300;
// Below 1 what is likely gets likelier.
constexpr double kTemperature = 0.8;

TrainingPlan PlanOf(const Options& options, const TransformerOptions& own, const Text& text) {
  const int64_t per_step = options.batch * own.shape.context;
  const int64_t per_round = std::max<int64_t>(1, own.steps / kRounds);
  return {.steps = own.steps,
          .steps_per_round = per_round,
          .label =
              [per_round, steps = own.steps](int64_t round) {
                return absl::StrCat("step ", std::min((round + 1) * per_round, steps), "/", steps);
              },
          .items = [per_step](int64_t steps) { return steps * per_step; },
          .items_per_epoch = text.train().size(0),
          .warm_up = 0.05};
}

}  // namespace

bool TextLearner::interrupted() const { return InterruptedBy() != 0; }

class TextTraining::Task : public TrainingTask {
 public:
  Task(const TextTraining& training, TextLearner& learner)
      : options_(training.options_),
        own_(training.own_),
        text_(*training.text_),
        step_(training.loop_.step()),
        learner_(learner) {}

  absl::Status Start(double learning_rate) override {
    const TextBatch batch =
        RandomPieces(text_.train(), options_.batch, own_.shape.context, options_.seed, step_++);
    return learner_.Start(batch, learning_rate);
  }
  absl::StatusOr<StepResult> Finish() override {
    const absl::StatusOr<double> loss = learner_.Finish();
    if (!loss.ok()) return loss.status();
    return StepResult{*loss, options_.batch * own_.shape.context};
  }
  int most_in_flight() const override { return learner_.most_in_flight(); }

  absl::StatusOr<Evaluation> Evaluate() override {
    const int64_t n = options_.batch;
    const TextBatch pieces = SpreadPieces(text_.test(), kTestBatches * n, own_.shape.context);
    Evaluation mean;
    for (int64_t i = 0; i < kTestBatches; ++i) {
      if (interrupted()) return absl::CancelledError("interrupted");
      const absl::StatusOr<at::Tensor> scores =
          learner_.Predict(pieces.inputs.slice(0, i * n, (i + 1) * n));
      if (!scores.ok()) return scores.status();
      const at::Tensor targets = pieces.targets.slice(0, i * n, (i + 1) * n);
      mean.loss += TextLoss(*scores, targets).item<double>() / kTestBatches;
      mean.accuracy += TextAccuracy(*scores, targets) / kTestBatches;
    }
    return mean;
  }

  bool interrupted() const override { return learner_.interrupted(); }

 private:
  const Options& options_;
  const TransformerOptions& own_;
  const Text& text_;
  int64_t step_;
  TextLearner& learner_;
};

absl::Status TextTraining::CheckText(const TransformerOptions& own, const Text& text) {
  if (text.test().size(0) > own.shape.context) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--data: the text has too few characters for --context=", own.shape.context,
                   ": the last twentieth, which is for tests, has ", text.test().size(0)));
}

absl::StatusOr<std::unique_ptr<TextTraining>> TextTraining::Create(const Options& options,
                                                                   const TransformerOptions& own,
                                                                   const Text* text, Role role) {
  if (auto s = CheckText(own, *text); !s.ok()) return s;
  absl::StatusOr<TrainingLoop> loop = TrainingLoop::Create(
      options, PlanOf(options, own, *text),
      {.items = "tokens", .by_step = true, .accuracy = "next characters that are right (%)"}, role);
  if (!loop.ok()) return loop.status();
  return std::unique_ptr<TextTraining>(new TextTraining(options, own, text, *std::move(loop)));
}

TextTraining::TextTraining(const Options& options, const TransformerOptions& own, const Text* text,
                           TrainingLoop loop)
    : options_(options), own_(own), text_(text), loop_(std::move(loop)) {}

absl::Status TextTraining::Run(TextLearner& learner, const Save& save) {
  Task task(*this, learner);
  if (auto s = loop_.Run(task, save); !s.ok() || !loop_.leads()) return s;
  const std::string result = absl::StrFormat(
      "test loss %.3f, %.1f %% of next characters right after %d steps in %.1f s (%.0f tokens/s "
      "while training)",
      loop_.last().loss, 100 * loop_.last().accuracy, own_.steps, loop_.seconds(),
      loop_.items_per_second());
  const std::string sample = absl::StrCat(options_.output, "/sample.txt");
  if (auto s = WriteSample(learner, sample); !s.ok()) return s;
  loop_.PrintResults("Transformer", result);
  std::printf("sample:  %s\n", sample.c_str());
  return absl::OkStatus();
}

absl::Status TextTraining::WriteSample(TextLearner& learner, const std::string& path) {
  // From the beginning of a line on.
  const absl::StatusOr<at::Tensor> written =
      WriteText(learner, text_->Encode('\n'), own_.micro_batches, kSampleLength, own_.shape.context,
                options_.seed);
  if (!written.ok()) return written.status();
  std::ofstream file(path);
  for (int64_t i = 0; i < written->size(0); ++i) {
    const std::string text = text_->Decode((*written)[i]);
    file << text << "\n";
    if (i == 0) std::printf("it writes:\n%s\n\n", text.c_str());
  }
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> WriteText(TextLearner& learner, int64_t first, int64_t n, int64_t length,
                                     int64_t context, uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  at::Tensor tokens = at::full({n, 1}, first, at::kLong);
  while (tokens.size(1) <= length) {
    if (learner.interrupted()) return absl::CancelledError("interrupted");
    const int64_t seen = std::min(tokens.size(1), context);
    const absl::StatusOr<at::Tensor> scores =
        learner.Predict(tokens.slice(1, tokens.size(1) - seen).contiguous());
    if (!scores.ok()) return scores.status();
    const at::Tensor probabilities = at::softmax(scores->select(1, seen - 1) / kTemperature, -1);
    tokens = at::cat({tokens, at::multinomial(probabilities, 1, false, generator)}, 1);
  }
  return tokens.slice(1, 1);
}

}  // namespace distgrad
