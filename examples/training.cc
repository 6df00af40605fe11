// Runs the loop over epochs and steps, for any Learner.
#include "examples/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/interrupt.h"
#include "examples/model.h"

namespace distgrad {
namespace {

constexpr int64_t kTestBatch = 1000;
// Rows of the table for each epoch.
constexpr int64_t kRowsPerEpoch = 50;
// The share of a new step in the shown loss, a moving average.
constexpr double kShownLossShare = 0.05;

absl::Status CheckInterrupt() {
  return InterruptedBy() == 0 ? absl::OkStatus() : absl::CancelledError("interrupted");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Training>> Training::Create(const Options& options, Role role) {
  absl::StatusOr<FashionMnist> data = LoadFashionMnist(options.data);
  if (!data.ok()) return data.status();
  std::optional<Report> report;
  if (role == Role::kLead) {
    // What a run that goes on has of the table is known when its checkpoint is.
    const int64_t keeps = options.resume ? std::numeric_limits<int64_t>::max() : 0;
    absl::StatusOr<Report> started = Report::Create(options.output, keeps);
    if (!started.ok()) return started.status();
    report = *std::move(started);
  }
  return std::unique_ptr<Training>(new Training(options, *std::move(data), std::move(report)));
}

Training::Training(const Options& options, FashionMnist data, std::optional<Report> report)
    : options_(options),
      data_(std::move(data)),
      report_(std::move(report)),
      batches_(data_.train, options.batch, options.seed),
      screen_(report_.has_value() ? Screen::Stderr() : Screen::None()) {}

absl::Status Training::Resume(int64_t steps) {
  if (report_.has_value()) {
    absl::StatusOr<Report> report = Report::Create(options_.output, steps);
    if (!report.ok()) return report.status();
    report_ = *std::move(report);
  }
  batches_.Skip(steps);
  step_ = saved_ = steps;
  const int64_t per_epoch = batches_.batches_per_epoch();
  images_ = resumed_images_ =
      steps / per_epoch * data_.train.size() + steps % per_epoch * options_.batch;
  return absl::OkStatus();
}

absl::Status Training::Run(Learner& learner, const Save& save) {
  start_ = screen_.now();
  const absl::Status run = RunEpochs(learner, save);
  // Whatever stopped it but an error of the job itself, these steps were taken.
  const bool is_interrupted = absl::IsCancelled(run) && InterruptedBy() != 0;
  if (save != nullptr && step_ > saved_ && (run.ok() || is_interrupted)) {
    if (auto s = save(step_); !s.ok()) return s;
    saved_ = step_;
  }
  if (!run.ok()) return run;
  if (report_.has_value()) PrintResults();
  return absl::OkStatus();
}

absl::Status Training::RunEpochs(Learner& learner, const Save& save) {
  ProgressBar progress(screen_, options_.epochs * data_.train.size());
  const auto first = static_cast<int>(step_ / batches_.batches_per_epoch());
  for (int epoch = first; epoch < options_.epochs; ++epoch) {
    if (auto s = RunEpoch(learner, epoch, save, progress); !s.ok()) return s;
  }
  if (first < options_.epochs || !report_.has_value()) return absl::OkStatus();
  // It was over already.
  const absl::StatusOr<Evaluation> evaluation = Evaluate(learner);
  if (evaluation.ok()) last_ = *evaluation;
  return evaluation.status();
}

void Training::PrintResults() {
  const double took = seconds();
  const std::string result = absl::StrFormat(
      "test accuracy %.2f %% after %d %s in %.1f s (%.0f images/s)", 100 * last_.accuracy,
      options_.epochs, options_.epochs == 1 ? "epoch" : "epochs", took,
      static_cast<double>(images_ - resumed_images_) / took);
  std::printf("%s\n", result.c_str());
  std::printf("table:   %s\n", report_->table_path().c_str());
  const absl::Status drawn = report_->Draw(absl::StrCat("Fashion-MNIST: ", result));
  if (drawn.ok()) {
    std::printf("picture: %s\n", report_->picture_path().c_str());
  } else {
    std::printf("picture: left out, %s\n", std::string(drawn.message()).c_str());
  }
  std::fflush(stdout);
}

absl::Status Training::RunEpoch(Learner& learner, int epoch, const Save& save,
                                ProgressBar& progress) {
  const std::string label = absl::StrCat("epoch ", epoch + 1, "/", options_.epochs);
  progress.SetLabel(label);
  const int64_t steps = batches_.batches_per_epoch();
  const auto all_steps = static_cast<double>(steps * options_.epochs);
  const int64_t steps_per_row = std::max<int64_t>(1, steps / kRowsPerEpoch);
  const double began = seconds();
  double epoch_loss = 0;
  double row_loss = 0;
  double shown_loss = 0;
  int64_t row_steps = 0;
  int64_t epoch_images = 0;
  const int64_t first = step_ % steps;
  for (int64_t i = first; i < steps; ++i) {
    if (auto s = CheckInterrupt(); !s.ok()) return s;
    const double learning_rate =
        options_.learning_rate * (1 - static_cast<double>(step_) / all_steps);
    const Batch batch = batches_.Next();
    const absl::StatusOr<double> loss = learner.Step(batch, learning_rate);
    if (!loss.ok()) return loss.status();
    ++step_;
    if (!std::isfinite(*loss)) {
      return absl::OutOfRangeError(absl::StrCat("the loss is not a number any more after step ",
                                                step_, "; try a smaller --lr"));
    }
    images_ += batch.size();
    epoch_images += batch.size();
    epoch_loss += *loss * static_cast<double>(batch.size());
    row_loss += *loss;
    shown_loss += (*loss - shown_loss) * (i == first ? 1 : kShownLossShare);
    progress.Update(images_, shown_loss);
    if (save != nullptr && step_ % options_.every == 0) {
      if (auto s = save(step_); !s.ok()) return s;
      saved_ = step_;
    }
    if (!report_.has_value()) continue;
    if (++row_steps == steps_per_row || i + 1 == steps) {
      ReportRow row = NewRow();
      row.train_loss = row_loss / static_cast<double>(row_steps);
      if (auto s = report_->Add(row); !s.ok()) return s;
      row_loss = 0;
      row_steps = 0;
    }
  }
  if (!report_.has_value()) return absl::OkStatus();
  const double took = seconds() - began;

  absl::StatusOr<Evaluation> evaluation = Evaluate(learner);
  if (!evaluation.ok()) return evaluation.status();
  last_ = *evaluation;
  ReportRow row = NewRow();
  row.test_loss = last_.loss;
  row.test_accuracy = last_.accuracy;
  const auto count = static_cast<double>(epoch_images);
  progress.Print(absl::StrFormat(
      "%s: loss %.4f, test loss %.4f, test accuracy %.2f %%, %.1f s, %.0f images/s", label,
      epoch_loss / count, last_.loss, 100 * last_.accuracy, took, count / took));
  return report_->Add(row);
}

absl::StatusOr<Training::Evaluation> Training::Evaluate(Learner& learner) {
  Evaluation sum;
  const int64_t size = data_.test.size();
  for (int64_t begin = 0; begin < size; begin += kTestBatch) {
    if (auto s = CheckInterrupt(); !s.ok()) return s;
    const Batch batch = MakeBatch(data_.test, begin, std::min(begin + kTestBatch, size));
    const absl::StatusOr<at::Tensor> scores = learner.Predict(batch.images);
    if (!scores.ok()) return scores.status();
    sum.loss += Loss(*scores, batch.labels).item<double>() * static_cast<double>(batch.size());
    sum.accuracy += static_cast<double>(CountCorrect(*scores, batch.labels));
  }
  const auto count = static_cast<double>(size);
  return Evaluation{sum.loss / count, sum.accuracy / count};
}

ReportRow Training::NewRow() const {
  ReportRow row;
  row.epoch = static_cast<double>(images_) / static_cast<double>(data_.train.size());
  row.step = step_;
  row.seconds = seconds();
  row.images_per_second = static_cast<double>(images_ - resumed_images_) / row.seconds;
  return row;
}

double Training::seconds() const { return absl::ToDoubleSeconds(screen_.now() - start_); }

}  // namespace distgrad
