// Steps of pipelines whose schedules have those of the optimizer, with a learning rate for each:
// the worker that leads sends it to the others before it starts the step, and they take it in the
// step.
#ifndef DISTGRAD_EXAMPLES_PIPELINE_STEPS_H_
#define DISTGRAD_EXAMPLES_PIPELINE_STEPS_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/base/ids.h"
#include "core/pipeline/pipeline.h"
#include "core/worker/worker.h"

namespace distgrad {

// The rates that were sent to a worker. Thread-safe.
class LearningRates {
 public:
  // Lets the others send rates to this worker.
  static absl::StatusOr<std::shared_ptr<LearningRates>> Create(Worker* worker);

  // Returns the rate of the step in the context, once.
  absl::StatusOr<double> Take(const Context& context);

 private:
  absl::StatusOr<Message> Receive(const Request& request);

  absl::Mutex mu_;
  std::map<ContextId, double> rates_ ABSL_GUARDED_BY(mu_);  // of steps that have yet to come
};

// The steps that were started, and that nobody has waited for. For one thread.
class PipelineSteps {
 public:
  // While one is at the end of its schedule, the next one begins.
  static constexpr int kMostInFlight = 2;

  // The worker leads, and outlives it; `workers` have the stages.
  PipelineSteps(Worker* worker, std::vector<std::string> workers)
      : worker_(worker), workers_(std::move(workers)) {}

  // Starts a step, which comes behind those that run. The pipeline must outlive this.
  absl::Status Start(Pipeline& pipeline, double learning_rate, std::vector<at::Tensor> inputs,
                     std::vector<at::Tensor> targets);
  // Waits for the first one that runs, and returns its batch's loss.
  absl::StatusOr<at::Tensor> Finish();

 private:
  struct InFlight {
    Pipeline* pipeline = nullptr;
    Context context;  // outlives the step
    PipelineStep step;
    // Once somebody has waited for the step.
    absl::Status status;
    at::Tensor loss;
  };
  static void Wait(InFlight& step);

  Worker* const worker_;
  const std::vector<std::string> workers_;
  std::deque<InFlight> in_flight_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_PIPELINE_STEPS_H_
