// Runs a batch through the stages of the workers, and steps each stage's parameters.
#include "examples/distributed.h"

#include <string>
#include <utility>

#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "core/base/status.h"
#include "torch/optim/sgd.h"

namespace distgrad {

absl::StatusOr<std::unique_ptr<StageServer>> StageServer::Create(Worker* worker, uint64_t seed) {
  DG_ASSIGN_OR_RETURN(Stage stage, Stage::Create(worker->rank(), worker->world_size(), seed));
  std::unique_ptr<StageServer> server(new StageServer(worker, std::move(stage)));
  StageServer* const self = server.get();
  DG_RETURN_IF_ERROR(worker->Register("forward", [self](Request& r) { return self->Forward(r); }));
  DG_RETURN_IF_ERROR(worker->Register("step", [self](Request& r) { return self->Step(r); }));
  return server;
}

StageServer::StageServer(Worker* worker, Stage stage)
    : worker_(worker),
      stage_(std::move(stage)),
      optimizer_(std::make_unique<LocalOptimizer>(std::make_unique<torch::optim::SGD>(
          stage_.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum)))) {}

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

absl::StatusOr<Message> StageServer::Step(Request& request) {
  if (request.message.tensors.size() != 1 || !request.context.valid()) {
    return absl::InvalidArgumentError("step takes the learning rate, within a context");
  }
  const double learning_rate = request.message.tensors[0].item<double>();
  DG_RETURN_IF_ERROR(optimizer_->Step(*request.context.record(), learning_rate));
  return Message{};
}

absl::StatusOr<double> DistributedLearner::Step(const Batch& batch, double learning_rate) {
  const Context context = worker_->NewContext();
  const CallOptions in_context{.context = &context};
  DG_ASSIGN_OR_RETURN(
      const Message reply,
      worker_->Call(worker_->name(), "forward", {"", {batch.images, batch.labels}}, in_context));
  const at::Tensor& loss = reply.tensors.at(0);
  DG_RETURN_IF_ERROR(context.Backward({loss}));

  std::vector<Future<Message>> steps;
  const at::Tensor rate = at::scalar_tensor(learning_rate, at::kDouble);
  for (const std::string& name : worker_->names()) {
    steps.push_back(worker_->CallAsync(name, "step", {"", {rate}}, in_context));
  }
  for (const Future<Message>& step : steps) DG_RETURN_IF_ERROR(step.Wait().status());
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> DistributedLearner::Predict(const at::Tensor& images) {
  const c10::NoGradGuard no_grad;
  DG_ASSIGN_OR_RETURN(const Message reply,
                      worker_->Call(worker_->name(), "forward", {"", {images}}));
  return reply.tensors.at(0);
}

}  // namespace distgrad
