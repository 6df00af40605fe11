// Runs batches through the stages of the workers, and steps the optimizer of all.
#include "examples/distributed.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/cat.h"
#include "core/base/status.h"
#include "core/pipeline/schedule.h"
#include "torch/optim/sgd.h"

namespace distgrad {
namespace {

constexpr char kPipeline[] = "fashion_mnist";

using Tensors = std::vector<at::Tensor>;

}  // namespace

StageServer::StageServer(Stage stage)
    : stage_(std::move(stage)),
      optimizer_(std::make_unique<LocalOptimizer>(std::make_unique<torch::optim::SGD>(
          stage_.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum)))) {}

absl::StatusOr<std::unique_ptr<StageServer>> StageServer::Create(
    Worker* worker, uint64_t seed, std::function<void(const StageSpan&)> on_action,
    at::Device device) {
  const int number = worker->rank();
  DG_ASSIGN_OR_RETURN(Stage stage, Stage::Create(number, worker->world_size(), seed, device));
  std::unique_ptr<StageServer> server(new StageServer(std::move(stage)));
  DG_ASSIGN_OR_RETURN(const std::shared_ptr<LearningRates> rates, LearningRates::Create(worker));
  const Stage& layers = server->stage_;
  LocalOptimizer& optimizer = *server->optimizer_;
  DG_ASSIGN_OR_RETURN(
      server->stages_,
      PipelineStages::Create(
          worker, kPipeline,
          {{number,
            {.forward = [&layers](Tensors in) { return Tensors{layers.Forward(in[0])}; },
             .loss = [](Tensors out, Tensors labels) { return Loss(out[0], labels[0]); },
             .step = [&optimizer, rates](const Context& context) -> absl::Status {
               DG_ASSIGN_OR_RETURN(const double rate, rates->Take(context));
               return optimizer.Step(*context.record(), rate);
             }}}},
          {.on_action = std::move(on_action)}));
  return server;
}

CheckpointContents StageServer::Contents() const {
  return {.tensors = stage_.named_parameters(), .optimizers = {{"sgd", optimizer_.get()}}};
}

absl::StatusOr<Pipeline*> DistributedLearner::PipelineFor(int64_t images, bool steps) {
  const int micro_batches = static_cast<int>(std::min<int64_t>(micro_batches_, images));
  std::unique_ptr<Pipeline>& pipeline = pipelines_[{micro_batches, steps}];
  if (pipeline == nullptr) {
    const int stages = worker_->world_size();
    // The hand-overs take as long as small actions, and more forwards ahead fill that time; but
    // with fewer micro-batches all ranks are idle for longer then.
    const int ahead = std::max(1, std::min(3, micro_batches / std::max(1, stages - 1)));
    DG_ASSIGN_OR_RETURN(Schedule schedule, ZeroBubble(stages, micro_batches, ahead));
    if (steps) schedule = WithSteps(std::move(schedule));
    DG_ASSIGN_OR_RETURN(pipeline, Pipeline::Create(worker_, {.name = kPipeline,
                                                             .workers = worker_->names(),
                                                             .schedule = std::move(schedule)}));
  }
  return pipeline.get();
}

absl::StatusOr<at::Tensor> DistributedLearner::Gradients(const Context& context,
                                                         const Batch& batch) {
  DG_ASSIGN_OR_RETURN(Pipeline* const pipeline, PipelineFor(batch.size(), /*steps=*/false));
  DG_ASSIGN_OR_RETURN(PipelineResult result,
                      pipeline->Train(context, {batch.images}, {batch.labels}));
  return std::move(result.loss);
}

absl::StatusOr<double> DistributedLearner::Step(const Batch& batch, double learning_rate) {
  DG_RETURN_IF_ERROR(Start(batch, learning_rate));
  return Finish();
}

absl::Status DistributedLearner::Start(const Batch& batch, double learning_rate) {
  DG_ASSIGN_OR_RETURN(Pipeline* const pipeline, PipelineFor(batch.size(), /*steps=*/true));
  return steps_.Start(*pipeline, learning_rate, {batch.images}, {batch.labels});
}

absl::StatusOr<double> DistributedLearner::Finish() {
  DG_ASSIGN_OR_RETURN(const at::Tensor loss, steps_.Finish());
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> DistributedLearner::Predict(const at::Tensor& images) {
  DG_ASSIGN_OR_RETURN(Pipeline* const pipeline, PipelineFor(images.size(0), /*steps=*/false));
  DG_ASSIGN_OR_RETURN(const PipelineResult result, pipeline->Evaluate({images}));
  Tensors scores;
  for (const Tensors& outputs : result.outputs) scores.push_back(outputs.at(0));
  return at::cat(scores);
}

}  // namespace distgrad
