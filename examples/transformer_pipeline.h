// Training the transformer as a pipeline over workers, or as several replicas of one.
#ifndef DISTGRAD_EXAMPLES_TRANSFORMER_PIPELINE_H_
#define DISTGRAD_EXAMPLES_TRANSFORMER_PIPELINE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/checkpoint/job/part.h"
#include "core/optim/local_optimizer.h"
#include "core/parallel/process_group/process_group.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stages.h"
#include "core/worker/worker.h"
#include "examples/pipeline_steps.h"
#include "examples/text_training.h"
#include "examples/trace_file.h"
#include "examples/transformer_stage.h"

namespace distgrad {

// A worker's stages, and its optimizer, which steps in the schedule: from averages over the
// replicas, if there are several. Worker r * stages + s has rank s of replica r. Thread-safe.
class TextStageServer {
 public:
  // The worker must outlive it.
  static absl::StatusOr<std::unique_ptr<TextStageServer>> Create(Worker* worker,
                                                                 const TransformerOptions& options,
                                                                 const Options& common,
                                                                 const TraceFile& trace);

  // What a checkpoint has of it. It has to outlive the part that is made of them.
  CheckpointContents Contents() const;

  // On a worker that leads a replica: the group of those that do; null if there is one replica.
  const std::shared_ptr<ProcessGroup>& leaders() const { return leaders_; }

 private:
  explicit TextStageServer(std::vector<TransformerStage> parts);

  // Constant after Create().
  const std::vector<TransformerStage> parts_;
  const std::map<std::string, at::Tensor> parameters_;  // of all parts
  const std::unique_ptr<LocalOptimizer> optimizer_;
  std::shared_ptr<ProcessGroup> leaders_;
  std::unique_ptr<PipelineStages> stages_;
};

// Leads one replica, on the worker of its first stage. For one thread.
class PipelineTextLearner : public TextLearner {
 public:
  // Worker and server must outlive it.
  static absl::StatusOr<std::unique_ptr<PipelineTextLearner>> Create(
      Worker* worker, const TransformerOptions& options, const TextStageServer& server);

  // Takes the batch of all replicas, and computes with this one's rows of it.
  absl::StatusOr<double> Step(const TextBatch& batch, double learning_rate) override;
  absl::Status Start(const TextBatch& batch, double learning_rate) override;
  absl::StatusOr<double> Finish() override;
  int most_in_flight() const override { return PipelineSteps::kMostInFlight; }
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& tokens) override;
  // All replicas end after the same step.
  bool interrupted() const override;

 private:
  PipelineTextLearner(Worker* worker, std::vector<std::string> workers,
                      std::unique_ptr<Pipeline> pipeline, std::shared_ptr<ProcessGroup> leaders);

  const std::unique_ptr<Pipeline> pipeline_;
  // A group of its own: a rank averages gradients of the next step at the same time, and the
  // collectives of a group come in one order on all of its ranks.
  const std::shared_ptr<ProcessGroup> leaders_;
  PipelineSteps steps_;
  bool some_interrupted_ = false;  // with replicas: one of them, by the last step
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRANSFORMER_PIPELINE_H_
