// Makes a worker's stages, and runs batches through those of all workers of a replica.
#include "examples/transformer_pipeline.h"

#include <map>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/scalar_tensor.h"
#include "ATen/ops/stack.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/pipeline/schedule.h"
#include "examples/interrupt.h"
#include "torch/optim/adamw.h"

namespace distgrad {
namespace {

constexpr char kPipeline[] = "transformer";

using Tensors = std::vector<at::Tensor>;

std::map<std::string, at::Tensor> ParametersOf(const std::vector<TransformerStage>& parts) {
  std::map<std::string, at::Tensor> all;
  for (const TransformerStage& part : parts) {
    all.insert(part.named_parameters().begin(), part.named_parameters().end());
  }
  return all;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TextStageServer>> TextStageServer::Create(
    Worker* worker, const TransformerOptions& options, const Options& common,
    const TraceFile& trace) {
  DG_ASSIGN_OR_RETURN(const Schedule schedule, MakeSchedule(options));
  const int rank = worker->rank() % options.stages, replica = worker->rank() / options.stages;
  std::vector<int> numbers;
  std::vector<TransformerStage> parts;
  for (int s = 0; s < schedule.stages(); ++s) {
    if (schedule.rank_of_stage[s] != rank) continue;
    DG_ASSIGN_OR_RETURN(TransformerStage part,
                        TransformerStage::Create(options.shape, s, schedule.stages(), common.seed));
    numbers.push_back(s);
    parts.push_back(std::move(part));
  }
  std::unique_ptr<TextStageServer> server(new TextStageServer(std::move(parts)));
  TextStageServer* const self = server.get();

  std::shared_ptr<GradientAverager> averager;
  if (options.replicas > 1) {
    const auto join = [&](std::string name) {
      return ProcessGroup::Create({.name = std::move(name),
                                   .store = worker->store(),
                                   .rank = replica,
                                   .size = options.replicas,
                                   .timeout = common.timeout,
                                   .join_timeout = common.timeout,
                                   .host = worker->host(),
                                   .cluster_key = worker->cluster_key(),
                                   .certificates = worker->certificates()});
    };
    DG_ASSIGN_OR_RETURN(std::shared_ptr<ProcessGroup> group,
                        join(absl::StrCat("replicas of rank ", rank)));
    if (rank == 0) {
      DG_ASSIGN_OR_RETURN(server->leaders_, join("leaders of replicas"));
    }
    std::vector<NamedTensor> parameters;
    for (const auto& [name, tensor] : server->parameters_) parameters.push_back({name, tensor});
    DG_ASSIGN_OR_RETURN(averager, GradientAverager::Create(std::move(group), std::move(parameters),
                                                           {}, {.in_backward = false}));
  }

  DG_ASSIGN_OR_RETURN(const std::shared_ptr<LearningRates> rates, LearningRates::Create(worker));
  std::map<int, PipelineStage> stages;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const TransformerStage& part = server->parts_[i];
    stages[numbers[i]] = {
        .forward = [&part](Tensors in) -> Tensors { return {part.Forward(in[0])}; },
        .loss = [](Tensors out, Tensors targets) { return TextLoss(out[0], targets[0]); },
        .step = [](const Context&) { return absl::OkStatus(); }};
  }
  // One optimizer has the parameters of all stages here.
  stages.at(numbers[0]).step = [self, rates](const Context& context) -> absl::Status {
    DG_ASSIGN_OR_RETURN(const double rate, rates->Take(context));
    return self->optimizer_->Step(*context.record(), rate);
  };
  DG_ASSIGN_OR_RETURN(server->stages_,
                      PipelineStages::Create(
                          worker, kPipeline, std::move(stages),
                          {.averager = std::move(averager), .on_action = trace.StageRecorder()}));
  return server;
}

TextStageServer::TextStageServer(std::vector<TransformerStage> parts)
    : parts_(std::move(parts)),
      parameters_(ParametersOf(parts_)),
      optimizer_(std::make_unique<LocalOptimizer>(MakeTextOptimizer(parameters_))) {}

CheckpointContents TextStageServer::Contents() const {
  return {.tensors = parameters_, .optimizers = {{"adamw", optimizer_.get()}}};
}

absl::StatusOr<std::unique_ptr<PipelineTextLearner>> PipelineTextLearner::Create(
    Worker* worker, const TransformerOptions& options, const TextStageServer& server) {
  const std::vector<std::string> all = worker->names();
  const std::vector<std::string> workers(all.begin() + worker->rank(),
                                         all.begin() + worker->rank() + options.stages);
  DG_ASSIGN_OR_RETURN(Schedule schedule, MakeSchedule(options));
  DG_ASSIGN_OR_RETURN(std::unique_ptr<Pipeline> pipeline,
                      Pipeline::Create(worker, {.name = kPipeline,
                                                .workers = workers,
                                                .schedule = WithSteps(std::move(schedule))}));
  return std::unique_ptr<PipelineTextLearner>(
      new PipelineTextLearner(worker, workers, std::move(pipeline), server.leaders()));
}

PipelineTextLearner::PipelineTextLearner(Worker* worker, std::vector<std::string> workers,
                                         std::unique_ptr<Pipeline> pipeline,
                                         std::shared_ptr<ProcessGroup> leaders)
    : pipeline_(std::move(pipeline)),
      leaders_(std::move(leaders)),
      steps_(worker, std::move(workers)) {}

absl::StatusOr<double> PipelineTextLearner::Step(const TextBatch& batch, double learning_rate) {
  DG_RETURN_IF_ERROR(Start(batch, learning_rate));
  return Finish();
}

absl::Status PipelineTextLearner::Start(const TextBatch& batch, double learning_rate) {
  const int64_t replicas = leaders_ == nullptr ? 1 : leaders_->size();
  const int64_t replica = leaders_ == nullptr ? 0 : leaders_->rank();
  const int64_t rows = batch.inputs.size(0) / replicas;
  const auto own = [&](const at::Tensor& all) { return all.narrow(0, replica * rows, rows); };
  return steps_.Start(*pipeline_, learning_rate, {own(batch.inputs)}, {own(batch.targets)});
}

absl::StatusOr<double> PipelineTextLearner::Finish() {
  DG_ASSIGN_OR_RETURN(const at::Tensor loss, steps_.Finish());
  if (leaders_ == nullptr) return loss.item<double>();

  // Each replica waits here until all have taken the step: so a checkpoint may be saved now.
  const at::Tensor said =
      at::stack({loss.to(at::kDouble), at::scalar_tensor(InterruptedBy(), at::kDouble)});
  DG_RETURN_IF_ERROR(leaders_->Average({said}));
  some_interrupted_ = said[1].item<double>() != 0;
  return said[0].item<double>();
}

absl::StatusOr<at::Tensor> PipelineTextLearner::Predict(const at::Tensor& tokens) {
  DG_ASSIGN_OR_RETURN(const PipelineResult result, pipeline_->Evaluate({tokens}));
  Tensors scores;
  for (const Tensors& outputs : result.outputs) scores.push_back(outputs.at(0));
  return at::cat(scores);
}

bool PipelineTextLearner::interrupted() const {
  return leaders_ == nullptr ? TextLearner::interrupted() : some_interrupted_;
}

}  // namespace distgrad
