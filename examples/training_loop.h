// The loop that all examples share: steps, progress, evaluation, checkpoints, report.
#ifndef DISTGRAD_EXAMPLES_TRAINING_LOOP_H_
#define DISTGRAD_EXAMPLES_TRAINING_LOOP_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "examples/options.h"
#include "examples/progress.h"
#include "examples/report.h"

namespace distgrad {

// What is learnt, and from what. For one thread.
class TrainingTask {
 public:
  struct StepResult {
    double loss = 0;    // mean of the batch, before the step
    int64_t items = 0;  // of the batch: images, or tokens
  };
  struct Evaluation {
    double loss = 0;
    double accuracy = 0;  // 0 to 1
  };

  virtual ~TrainingTask() = default;

  // Starts a step of the optimizer behind those that run, of which there are at most so many.
  virtual absl::Status Start(double learning_rate) = 0;
  virtual int most_in_flight() const = 0;
  // Waits for the first of those that run.
  virtual absl::StatusOr<StepResult> Finish() = 0;
  // No step runs meanwhile.
  virtual absl::StatusOr<Evaluation> Evaluate() = 0;
  // Whether to end between two steps, as after Ctrl-C.
  virtual bool interrupted() const;
};

// How long a run is, and what it calls things.
struct TrainingPlan {
  int64_t steps = 0;
  int64_t steps_per_round = 0;  // an evaluation comes after each round, and at the end
  std::function<std::string(int64_t round)> label;
  // After so many steps.
  std::function<int64_t(int64_t steps)> items;
  int64_t items_per_epoch = 0;
  double warm_up = 0;  // the part of the steps in which the learning rate rises, 0 to 1
};

// One run in one process. For one thread.
class TrainingLoop {
 public:
  // What a process does beside learning.
  enum class Role {
    kLead,    // evaluates after each round, shows how far it is, and writes the report
    kFollow,  // nothing: another process does that
  };
  using Save = std::function<absl::Status(int64_t steps)>;

  // Starts the report, so that errors there come before anything else is started.
  static absl::StatusOr<TrainingLoop> Create(const Options& options, TrainingPlan plan,
                                             ReportStyle style, Role role);

  // Goes on where so many steps were taken. Before Run().
  absl::Status Resume(int64_t steps);

  // kCancelled when the task is interrupted. Saves every Options::every steps, at the end, and
  // after an interrupt, if there is `save`.
  absl::Status Run(TrainingTask& task, const Save& save);

  // Prints in one line what the run has come to, behind `result`, and where the report is.
  void PrintResults(const std::string& title, const std::string& result);

  bool leads() const { return report_.has_value(); }
  int64_t step() const { return step_; }
  const TrainingTask::Evaluation& last() const { return last_; }  // the last evaluation
  double seconds() const;
  double items_per_second() const;  // of the time without evaluations

 private:
  TrainingLoop(const Options& options, TrainingPlan plan, ReportStyle style,
               std::optional<Report> report);

  absl::Status RunRounds(TrainingTask& task, const Save& save);
  absl::Status RunRound(TrainingTask& task, const Save& save, ProgressBar& progress);
  absl::Status Evaluate(TrainingTask& task);
  // Starts as many steps as may run, but none behind step `end`, or the next that is saved.
  absl::Status StartSteps(TrainingTask& task, bool saves, int64_t end);
  // Of the step behind so many others: it rises to the highest one in the first steps, for large
  // batches diverge without that (Goyal et al., arXiv:1706.02677), and falls to 0 in a straight
  // line.
  double LearningRate(int64_t steps) const;
  ReportRow NewRow() const;

  // Constant after construction.
  Options options_;
  TrainingPlan plan_;
  ReportStyle style_;

  std::optional<Report> report_;  // with kLead
  Screen screen_;
  absl::Time start_;
  absl::Duration evaluated_for_;
  int64_t step_ = 0;     // how many were taken
  int64_t started_ = 0;  // those and what runs
  int64_t saved_ = 0;    // the step of the last checkpoint
  int64_t items_ = 0;
  int64_t resumed_items_ = 0;  // of another run
  TrainingTask::Evaluation last_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRAINING_LOOP_H_
