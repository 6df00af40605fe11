// Runs the loop over rounds and steps, for any task.
#include "examples/training_loop.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/interrupt.h"

namespace distgrad {
namespace {

// Rows of the table for each round.
constexpr int64_t kRowsPerRound = 50;
// The share of a new step in the shown loss, a moving average.
constexpr double kShownLossShare = 0.05;

absl::Status CheckInterrupt(const TrainingTask& task) {
  return task.interrupted() ? absl::CancelledError("interrupted") : absl::OkStatus();
}

}  // namespace

bool TrainingTask::interrupted() const { return InterruptedBy() != 0; }

absl::StatusOr<TrainingLoop> TrainingLoop::Create(const Options& options, TrainingPlan plan,
                                                  ReportStyle style, Role role) {
  std::optional<Report> report;
  if (role == Role::kLead) {
    // What a run that goes on has of the table is known when its checkpoint is.
    const int64_t keeps = options.resume ? std::numeric_limits<int64_t>::max() : 0;
    absl::StatusOr<Report> started = Report::Create(options.output, style, keeps);
    if (!started.ok()) return started.status();
    report = *std::move(started);
  }
  return TrainingLoop(options, std::move(plan), std::move(style), std::move(report));
}

TrainingLoop::TrainingLoop(const Options& options, TrainingPlan plan, ReportStyle style,
                           std::optional<Report> report)
    : options_(options),
      plan_(std::move(plan)),
      style_(std::move(style)),
      report_(std::move(report)),
      screen_(report_.has_value() ? Screen::Stderr() : Screen::None()) {}

absl::Status TrainingLoop::Resume(int64_t steps) {
  if (report_.has_value()) {
    absl::StatusOr<Report> report = Report::Create(options_.output, style_, steps);
    if (!report.ok()) return report.status();
    report_ = *std::move(report);
  }
  step_ = started_ = saved_ = steps;
  items_ = resumed_items_ = plan_.items(steps);
  return absl::OkStatus();
}

absl::Status TrainingLoop::Run(TrainingTask& task, const Save& save) {
  start_ = screen_.now();
  const absl::Status run = RunRounds(task, save);
  // Whatever stopped it but an error of the job itself, these steps were taken.
  const bool is_interrupted = absl::IsCancelled(run) && task.interrupted();
  if (save != nullptr && step_ > saved_ && (run.ok() || is_interrupted)) {
    if (auto s = save(step_); !s.ok()) return s;
    saved_ = step_;
  }
  return run;
}

absl::Status TrainingLoop::RunRounds(TrainingTask& task, const Save& save) {
  ProgressBar progress(screen_, plan_.items(plan_.steps), style_.items, items_);
  const bool is_over = step_ >= plan_.steps;
  while (step_ < plan_.steps) {
    if (auto s = RunRound(task, save, progress); !s.ok()) return s;
  }
  return is_over && leads() ? Evaluate(task) : absl::OkStatus();
}

absl::Status TrainingLoop::Evaluate(TrainingTask& task) {
  const absl::Time began = screen_.now();
  const absl::StatusOr<TrainingTask::Evaluation> evaluation = task.Evaluate();
  evaluated_for_ += screen_.now() - began;
  if (evaluation.ok()) last_ = *evaluation;
  return evaluation.status();
}

double TrainingLoop::LearningRate(int64_t steps) const {
  const auto all = static_cast<double>(plan_.steps);
  const double warm =
      std::min(1.0, static_cast<double>(steps + 1) / std::max(1.0, plan_.warm_up * all));
  return options_.learning_rate * warm * (1 - static_cast<double>(steps) / all);
}

absl::Status TrainingLoop::StartSteps(TrainingTask& task, bool saves, int64_t end) {
  // Those that run are taken, also after Ctrl-C.
  const absl::Status interrupt = CheckInterrupt(task);
  if (!interrupt.ok()) return started_ > step_ ? absl::OkStatus() : interrupt;
  if (saves) end = std::min(end, (step_ / options_.every + 1) * options_.every);
  while (started_ < end && started_ - step_ < task.most_in_flight()) {
    if (auto s = task.Start(LearningRate(started_)); !s.ok()) {
      // Where one that runs has failed that says why.
      for (; started_ > step_; --started_) {
        if (auto step = task.Finish(); !step.ok()) return step.status();
      }
      return s;
    }
    ++started_;
  }
  return absl::OkStatus();
}

absl::Status TrainingLoop::RunRound(TrainingTask& task, const Save& save, ProgressBar& progress) {
  const int64_t round = step_ / plan_.steps_per_round;
  const std::string label = plan_.label(round);
  progress.SetLabel(label);
  const int64_t end = std::min((round + 1) * plan_.steps_per_round, plan_.steps);
  const int64_t steps_per_row = std::max<int64_t>(1, plan_.steps_per_round / kRowsPerRound);
  const double began = seconds();
  double round_loss = 0;
  double row_loss = 0;
  double shown_loss = 0;
  int64_t row_steps = 0;
  int64_t round_items = 0;
  for (bool is_first = true; step_ < end; is_first = false) {
    // Of several replicas one alone saves, and all end after the same step.
    const bool saves = !options_.checkpoint.empty();
    if (auto s = StartSteps(task, saves, end); !s.ok()) return s;
    const absl::StatusOr<TrainingTask::StepResult> step = task.Finish();
    if (!step.ok()) return step.status();
    ++step_;
    if (!std::isfinite(step->loss)) {
      return absl::OutOfRangeError(absl::StrCat("the loss is not a number any more after step ",
                                                step_, "; try a smaller --lr"));
    }
    items_ += step->items;
    round_items += step->items;
    round_loss += step->loss * static_cast<double>(step->items);
    row_loss += step->loss;
    shown_loss += (step->loss - shown_loss) * (is_first ? 1 : kShownLossShare);
    progress.Update(items_, shown_loss, items_per_second());
    if (save != nullptr && step_ % options_.every == 0) {
      if (auto s = save(step_); !s.ok()) return s;
      saved_ = step_;
    }
    if (!leads()) continue;
    if (++row_steps == steps_per_row || step_ == end) {
      ReportRow row = NewRow();
      row.train_loss = row_loss / static_cast<double>(row_steps);
      if (auto s = report_->Add(row); !s.ok()) return s;
      row_loss = 0;
      row_steps = 0;
    }
  }
  if (!leads()) return absl::OkStatus();
  const double took = seconds() - began;

  if (auto s = Evaluate(task); !s.ok()) return s;
  ReportRow row = NewRow();
  row.test_loss = last_.loss;
  row.test_accuracy = last_.accuracy;
  const auto count = static_cast<double>(round_items);
  progress.Print(absl::StrFormat(
      "%s: loss %.4f, test loss %.4f, test accuracy %.2f %%, %.1f s, %.0f %s/s", label,
      round_loss / count, last_.loss, 100 * last_.accuracy, took, count / took, style_.items));
  return report_->Add(row);
}

void TrainingLoop::PrintResults(const std::string& title, const std::string& result) {
  std::printf("%s\n", result.c_str());
  std::printf("table:   %s\n", report_->table_path().c_str());
  const absl::Status drawn = report_->Draw(absl::StrCat(title, ": ", result));
  if (drawn.ok()) {
    std::printf("picture: %s\n", report_->picture_path().c_str());
  } else {
    std::printf("picture: left out, %s\n", std::string(drawn.message()).c_str());
  }
  std::fflush(stdout);
}

ReportRow TrainingLoop::NewRow() const {
  ReportRow row;
  row.epoch = static_cast<double>(items_) / static_cast<double>(plan_.items_per_epoch);
  row.step = step_;
  row.seconds = seconds();
  row.items_per_second = items_per_second();
  return row;
}

double TrainingLoop::seconds() const { return absl::ToDoubleSeconds(screen_.now() - start_); }

double TrainingLoop::items_per_second() const {
  const double trained_for = seconds() - absl::ToDoubleSeconds(evaluated_for_);
  return static_cast<double>(items_ - resumed_items_) / trained_for;
}

}  // namespace distgrad
