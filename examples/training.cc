// Gives the images of Fashion-MNIST to a Learner, in the loop that all examples share.
#include "examples/training.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/model.h"

namespace distgrad {
namespace {

constexpr int64_t kTestBatch = 1000;

TrainingPlan PlanOf(const Options& options, int64_t images) {
  const int64_t per_epoch = BatchesPerEpoch(images, options.batch);
  return {.steps = per_epoch * options.epochs,
          .steps_per_round = per_epoch,
          .label = [epochs = options.epochs](
                       int64_t epoch) { return absl::StrCat("epoch ", epoch + 1, "/", epochs); },
          .items =
              [per_epoch, images, batch = options.batch](int64_t steps) {
                return steps / per_epoch * images + steps % per_epoch * batch;
              },
          .items_per_epoch = images,
          .warm_up = 0.1};
}

}  // namespace

class Training::Task : public TrainingTask {
 public:
  Task(Training& training, Learner& learner) : training_(training), learner_(learner) {}

  absl::Status Start(double learning_rate) override {
    const Batch batch = training_.batches_.Next();
    in_flight_.push_back(batch.size());
    return learner_.Start(batch, learning_rate);
  }
  absl::StatusOr<StepResult> Finish() override {
    const absl::StatusOr<double> loss = learner_.Finish();
    if (!loss.ok()) return loss.status();
    const int64_t images = in_flight_.front();
    in_flight_.pop_front();
    return StepResult{*loss, images};
  }
  int most_in_flight() const override { return learner_.most_in_flight(); }

  absl::StatusOr<Evaluation> Evaluate() override {
    Evaluation sum;
    const Dataset& test = training_.data_.test;
    for (int64_t begin = 0; begin < test.size(); begin += kTestBatch) {
      if (interrupted()) return absl::CancelledError("interrupted");
      const Batch batch = MakeBatch(test, begin, std::min(begin + kTestBatch, test.size()));
      const absl::StatusOr<at::Tensor> scores = learner_.Predict(batch.images);
      if (!scores.ok()) return scores.status();
      sum.loss += Loss(*scores, batch.labels).item<double>() * static_cast<double>(batch.size());
      sum.accuracy += static_cast<double>(CountCorrect(*scores, batch.labels));
    }
    const auto count = static_cast<double>(test.size());
    return Evaluation{sum.loss / count, sum.accuracy / count};
  }

 private:
  Training& training_;
  Learner& learner_;
  std::deque<int64_t> in_flight_;  // how many images the batches have
};

absl::StatusOr<std::unique_ptr<Training>> Training::Create(const Options& options, Role role) {
  absl::StatusOr<FashionMnist> data = LoadFashionMnist(options.data);
  if (!data.ok()) return data.status();
  absl::StatusOr<TrainingLoop> loop =
      TrainingLoop::Create(options, PlanOf(options, data->train.size()), {}, role);
  if (!loop.ok()) return loop.status();
  return std::unique_ptr<Training>(new Training(options, *std::move(data), *std::move(loop)));
}

Training::Training(const Options& options, FashionMnist data, TrainingLoop loop)
    : options_(options),
      data_(std::move(data)),
      batches_(data_.train, options.batch, options.seed),
      loop_(std::move(loop)) {}

absl::Status Training::Resume(int64_t steps) {
  batches_.Skip(steps);
  return loop_.Resume(steps);
}

absl::Status Training::Run(Learner& learner, const Save& save) {
  Task task(*this, learner);
  if (auto s = loop_.Run(task, save); !s.ok() || !loop_.leads()) return s;
  loop_.PrintResults(
      "Fashion-MNIST",
      absl::StrFormat("test accuracy %.2f %% after %d %s in %.1f s (%.0f images/s while training)",
                      100 * loop_.last().accuracy, options_.epochs,
                      options_.epochs == 1 ? "epoch" : "epochs", loop_.seconds(),
                      loop_.items_per_second()));
  return absl::OkStatus();
}

}  // namespace distgrad
