// Runs a batch through the stages of the workers, backward too, and steps the optimizer of all.
#include "examples/distributed.h"

#include <utility>

#include "c10/core/GradMode.h"
#include "core/base/status.h"
#include "torch/optim/sgd.h"

namespace distgrad {

absl::StatusOr<std::unique_ptr<StageServer>> StageServer::Create(Worker* worker, uint64_t seed) {
  DG_ASSIGN_OR_RETURN(Stage stage, Stage::Create(worker->rank(), worker->world_size(), seed));
  DG_ASSIGN_OR_RETURN(
      std::unique_ptr<Optimizer> optimizer,
      Optimizer::Create(
          worker, std::make_unique<torch::optim::SGD>(
                      stage.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum))));
  std::unique_ptr<StageServer> server(
      new StageServer(worker, std::move(stage), std::move(optimizer)));
  StageServer* const self = server.get();
  DG_RETURN_IF_ERROR(worker->Register("forward", [self](Request& r) { return self->Forward(r); }));
  return server;
}

CheckpointContents StageServer::Contents() const {
  return {.tensors = stage_.named_parameters(), .optimizers = {{"sgd", optimizer_.get()}}};
}

absl::StatusOr<Message> StageServer::Forward(Request& request) {
  std::vector<at::Tensor>& tensors = request.message.tensors;
  if (tensors.empty() || tensors.size() > 2) {
    return absl::InvalidArgumentError("forward takes a batch, and its labels for the loss");
  }
  tensors[0] = stage_.Forward(tensors[0]);
  const int next = worker_->rank() + 1;
  if (next < worker_->world_size()) {
    return worker_->Call(worker_->names()[next], "forward", std::move(request.message),
                         request.Nested());
  }
  if (tensors.size() == 1) return std::move(request.message);
  return Message{"", {Loss(tensors[0], tensors[1])}};
}

absl::StatusOr<double> DistributedLearner::Step(const Batch& batch, double learning_rate) {
  const Context context = worker_->NewContext();
  DG_ASSIGN_OR_RETURN(const Message reply,
                      worker_->Call(worker_->name(), "forward", {"", {batch.images, batch.labels}},
                                    {.context = &context}));
  const at::Tensor& loss = reply.tensors.at(0);
  DG_RETURN_IF_ERROR(context.Backward({loss}));
  DG_RETURN_IF_ERROR(optimizer_->SetLearningRate(learning_rate));
  DG_RETURN_IF_ERROR(optimizer_->Step(context));
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> DistributedLearner::Predict(const at::Tensor& images) {
  const c10::NoGradGuard no_grad;
  DG_ASSIGN_OR_RETURN(const Message reply,
                      worker_->Call(worker_->name(), "forward", {"", {images}}));
  return reply.tensors.at(0);
}

}  // namespace distgrad
