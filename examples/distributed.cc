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

absl::StatusOr<std::unique_ptr<StageServer>> StageServer::Create(
    Worker* worker, uint64_t seed, std::function<void(const StageSpan&)> on_action,
    at::Device device) {
  const int number = worker->rank();
  DG_ASSIGN_OR_RETURN(Stage stage, Stage::Create(number, worker->world_size(), seed, device));
  DG_ASSIGN_OR_RETURN(
      std::unique_ptr<Optimizer> optimizer,
      Optimizer::Create(
          worker, std::make_unique<torch::optim::SGD>(
                      stage.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum))));
  std::unique_ptr<StageServer> server(new StageServer(std::move(stage), std::move(optimizer)));
  const Stage& layers = server->stage_;
  DG_ASSIGN_OR_RETURN(
      server->stages_,
      PipelineStages::Create(
          worker, kPipeline,
          {{number,
            {.forward = [&layers](Tensors in) { return Tensors{layers.Forward(in[0])}; },
             .loss = [](Tensors out, Tensors labels) { return Loss(out[0], labels[0]); }}}},
          {.on_action = std::move(on_action)}));
  return server;
}

CheckpointContents StageServer::Contents() const {
  return {.tensors = stage_.named_parameters(), .optimizers = {{"sgd", optimizer_.get()}}};
}

absl::StatusOr<Pipeline*> DistributedLearner::PipelineFor(int64_t images) {
  const int micro_batches = static_cast<int>(std::min<int64_t>(micro_batches_, images));
  std::unique_ptr<Pipeline>& pipeline = pipelines_[micro_batches];
  if (pipeline == nullptr) {
    const int stages = worker_->world_size();
    // With fewer micro-batches ZB-H2 is idle for longer than ZB-H1.
    DG_ASSIGN_OR_RETURN(Schedule schedule, micro_batches >= 2 * (stages - 1)
                                               ? ZeroBubbleH2(stages, micro_batches)
                                               : ZeroBubbleH1(stages, micro_batches));
    DG_ASSIGN_OR_RETURN(pipeline, Pipeline::Create(worker_, {.name = kPipeline,
                                                             .workers = worker_->names(),
                                                             .schedule = std::move(schedule)}));
  }
  return pipeline.get();
}

absl::StatusOr<at::Tensor> DistributedLearner::Gradients(const Context& context,
                                                         const Batch& batch) {
  DG_ASSIGN_OR_RETURN(Pipeline* const pipeline, PipelineFor(batch.size()));
  DG_ASSIGN_OR_RETURN(PipelineResult result,
                      pipeline->Train(context, {batch.images}, {batch.labels}));
  return std::move(result.loss);
}

absl::StatusOr<double> DistributedLearner::Step(const Batch& batch, double learning_rate) {
  const Context context = worker_->NewContext();
  DG_ASSIGN_OR_RETURN(const at::Tensor loss, Gradients(context, batch));
  DG_RETURN_IF_ERROR(optimizer_->SetLearningRate(learning_rate));
  DG_RETURN_IF_ERROR(optimizer_->Step(context));
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> DistributedLearner::Predict(const at::Tensor& images) {
  DG_ASSIGN_OR_RETURN(Pipeline* const pipeline, PipelineFor(images.size(0)));
  DG_ASSIGN_OR_RETURN(const PipelineResult result, pipeline->Evaluate({images}));
  Tensors scores;
  for (const Tensors& outputs : result.outputs) scores.push_back(outputs.at(0));
  return at::cat(scores);
}

}  // namespace distgrad
