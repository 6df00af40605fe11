// The training run on Fashion-MNIST that all variants of the example share.
#ifndef DISTGRAD_EXAMPLES_TRAINING_H_
#define DISTGRAD_EXAMPLES_TRAINING_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/dataset.h"
#include "examples/options.h"
#include "examples/stepper.h"
#include "examples/training_loop.h"

namespace distgrad {

// The momentum of all variants; Options has the other settings.
inline constexpr double kMomentum = 0.9;

// A network that learns, wherever its parameters are. For one thread.
class Learner : public Stepper<Batch> {
 public:
  // Returns the scores of the classes, float [n, 10], for images as in a Batch; records no
  // gradient.
  virtual absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) = 0;
};

// A training run of one process. For one thread.
class Training {
 public:
  using Role = TrainingLoop::Role;
  // Saves what it takes to go on from after so many steps.
  using Save = TrainingLoop::Save;

  // Reads the data and starts the report, so that errors there come before anything else is
  // started.
  static absl::StatusOr<std::unique_ptr<Training>> Create(const Options& options,
                                                          Role role = Role::kLead);

  // Goes on where so many steps were taken, with a learner that has taken them. Before Run().
  absl::Status Resume(int64_t steps);

  // Trains; with kLead it also prints the results, and where they are. kCancelled after Ctrl-C, if
  // CatchInterrupts() was called. Saves every Options::every steps, at the end, and after Ctrl-C.
  absl::Status Run(Learner& learner, const Save& save = nullptr);

 private:
  class Task;

  Training(const Options& options, FashionMnist data, TrainingLoop loop);

  // Constant after construction.
  const Options options_;
  const FashionMnist data_;

  ShuffledBatches batches_;
  TrainingLoop loop_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRAINING_H_
