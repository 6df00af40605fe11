// Training over workers, as a pipeline: each holds a stage of the network, worker 0 has the data
// and leads.
#ifndef DISTGRAD_EXAMPLES_DISTRIBUTED_H_
#define DISTGRAD_EXAMPLES_DISTRIBUTED_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/job/part.h"
#include "core/optim/local_optimizer.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stages.h"
#include "core/worker/worker.h"
#include "examples/model.h"
#include "examples/pipeline_steps.h"
#include "examples/training.h"

namespace distgrad {

// A worker's stage of the pipeline, and its part of the optimizer. Thread-safe.
class StageServer {
 public:
  // The worker must outlive it. `on_action` is as in PipelineStagesOptions.
  static absl::StatusOr<std::unique_ptr<StageServer>> Create(
      Worker* worker, uint64_t seed, std::function<void(const StageSpan&)> on_action = nullptr,
      at::Device device = at::kCPU);

  const std::vector<at::Tensor>& parameters() const { return stage_.parameters(); }
  // What a checkpoint has of it. It has to outlive the part that is made of them.
  CheckpointContents Contents() const;

 private:
  explicit StageServer(Stage stage);

  // Constant after Create().
  const Stage stage_;
  const std::unique_ptr<LocalOptimizer> optimizer_;
  std::unique_ptr<PipelineStages> stages_;
};

// Leads the training, on worker 0. For one thread.
class DistributedLearner : public Learner {
 public:
  // Cuts each batch into as many micro-batches, or into single images where it has fewer. The
  // worker must outlive it.
  DistributedLearner(Worker* worker, int micro_batches)
      : worker_(worker), micro_batches_(micro_batches), steps_(worker, worker->names()) {}

  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::Status Start(const Batch& batch, double learning_rate) override;
  absl::StatusOr<double> Finish() override;
  int most_in_flight() const override { return PipelineSteps::kMostInFlight; }
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

  // Leaves the gradients of the batch's mean loss, which it returns, in the context, and takes no
  // step.
  absl::StatusOr<at::Tensor> Gradients(const Context& context, const Batch& batch);

 private:
  // Returns the pipeline for a batch of so many images, with the optimizer's steps or without.
  absl::StatusOr<Pipeline*> PipelineFor(int64_t images, bool steps);

  Worker* const worker_;
  const int micro_batches_;
  // By their number of micro-batches, and whether they step.
  std::map<std::pair<int, bool>, std::unique_ptr<Pipeline>> pipelines_;
  PipelineSteps steps_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_DISTRIBUTED_H_
