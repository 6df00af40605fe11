// What takes steps of an optimizer on batches, wherever its parameters are.
#ifndef DISTGRAD_EXAMPLES_STEPPER_H_
#define DISTGRAD_EXAMPLES_STEPPER_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

// For one thread.
template <typename Batch>
class Stepper {
 public:
  virtual ~Stepper() = default;

  // Takes one step of the optimizer; returns the batch's mean loss before it.
  virtual absl::StatusOr<double> Step(const Batch& batch, double learning_rate) = 0;

  // Start a step behind those that run, of which there are at most so many, and wait for the first
  // of those that run. A step on one process is taken when it is started.
  virtual absl::Status Start(const Batch& batch, double learning_rate) {
    loss_ = Step(batch, learning_rate);
    return loss_.status();
  }
  virtual absl::StatusOr<double> Finish() { return loss_; }
  virtual int most_in_flight() const { return 1; }

 private:
  absl::StatusOr<double> loss_ = absl::FailedPreconditionError("no step was started");
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_STEPPER_H_
