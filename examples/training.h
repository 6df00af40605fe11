// The training run that all variants of the example share: epochs, progress, evaluation, report.
#ifndef DISTGRAD_EXAMPLES_TRAINING_H_
#define DISTGRAD_EXAMPLES_TRAINING_H_

#include <functional>
#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "examples/dataset.h"
#include "examples/options.h"
#include "examples/progress.h"
#include "examples/report.h"

namespace distgrad {

// The momentum of all variants; Options has the other settings.
inline constexpr double kMomentum = 0.9;

// A network that learns, wherever its parameters are. For one thread.
class Learner {
 public:
  virtual ~Learner() = default;

  // Takes one step of the optimizer; returns the batch's mean loss before it.
  virtual absl::StatusOr<double> Step(const Batch& batch, double learning_rate) = 0;

  // Returns the scores of the classes, float [n, 10], for images as in a Batch; records no
  // gradient.
  virtual absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) = 0;
};

// A training run of one process. For one thread.
class Training {
 public:
  // What a process does beside learning.
  enum class Role {
    kLead,    // evaluates after each epoch, shows how far it is, and writes the report
    kFollow,  // nothing: another process does that
  };

  // Reads the data and starts the report, so that errors there come before anything else is
  // started.
  static absl::StatusOr<std::unique_ptr<Training>> Create(const Options& options,
                                                          Role role = Role::kLead);

  // Goes on where so many steps were taken, with a learner that has taken them. Before Run().
  absl::Status Resume(int64_t steps);

  // Saves what it takes to go on from after so many steps.
  using Save = std::function<absl::Status(int64_t steps)>;

  // Trains; with kLead it also prints the results, and where they are. kCancelled after Ctrl-C, if
  // CatchInterrupts() was called. Saves every Options::every steps, at the end, and after Ctrl-C.
  absl::Status Run(Learner& learner, const Save& save = nullptr);

 private:
  struct Evaluation {
    double loss = 0;
    double accuracy = 0;
  };

  Training(const Options& options, FashionMnist data, std::optional<Report> report);

  absl::Status RunEpochs(Learner& learner, const Save& save);
  absl::Status RunEpoch(Learner& learner, int epoch, const Save& save, ProgressBar& progress);
  absl::StatusOr<Evaluation> Evaluate(Learner& learner);
  void PrintResults();
  ReportRow NewRow() const;
  double seconds() const;

  // Constant after construction.
  const Options options_;
  const FashionMnist data_;

  std::optional<Report> report_;  // with kLead
  ShuffledBatches batches_;
  Screen screen_;
  absl::Time start_;
  int64_t step_ = 0;
  int64_t saved_ = 0;  // the step of the last checkpoint
  int64_t images_ = 0;
  int64_t resumed_images_ = 0;  // of another run
  Evaluation last_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRAINING_H_
