// Keeps learning rates by the contexts of their steps, and steps in their order.
#include "examples/pipeline_steps.h"

#include "ATen/ops/scalar_tensor.h"
#include "core/base/status.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<LearningRates>> LearningRates::Create(Worker* worker) {
  auto rates = std::make_shared<LearningRates>();
  DG_RETURN_IF_ERROR(worker->Register(
      "learning rate", [rates](Request& request) { return rates->Receive(request); }));
  return rates;
}

absl::StatusOr<double> LearningRates::Take(const Context& context) {
  absl::MutexLock lock(&mu_);
  const auto found = rates_.find(context.id());
  if (found == rates_.end()) {
    return absl::FailedPreconditionError("nobody has sent the learning rate of this step");
  }
  const double rate = found->second;
  rates_.erase(found);
  return rate;
}

absl::StatusOr<Message> LearningRates::Receive(const Request& request) {
  if (request.message.tensors.size() != 1 || !request.context.valid()) {
    return absl::InvalidArgumentError("a learning rate comes alone, within a context");
  }
  const auto rate = request.message.tensors[0].item<double>();
  absl::MutexLock lock(&mu_);
  rates_[request.context.id()] = rate;
  return Message{};
}

absl::Status PipelineSteps::Start(Pipeline& pipeline, double learning_rate,
                                  std::vector<at::Tensor> inputs, std::vector<at::Tensor> targets) {
  // A stage runs the steps of one pipeline at a time.
  for (InFlight& step : in_flight_) {
    if (step.pipeline == &pipeline) continue;
    Wait(step);
    DG_RETURN_IF_ERROR(step.status);
  }
  InFlight next;
  next.pipeline = &pipeline;
  next.context = worker_->NewContext();
  const Message rate{"", {at::scalar_tensor(learning_rate, at::kDouble)}};
  const std::vector<WorkerRef> workers(workers_.begin(), workers_.end());
  for (const auto& reply :
       worker_->CallEach(workers, "learning rate", rate, {.context = &next.context})) {
    DG_RETURN_IF_ERROR(reply.status());
  }
  DG_ASSIGN_OR_RETURN(next.step,
                      pipeline.Start(next.context, std::move(inputs), std::move(targets)));
  in_flight_.push_back(std::move(next));
  return absl::OkStatus();
}

void PipelineSteps::Wait(InFlight& step) {
  if (!step.step.valid()) return;
  const absl::StatusOr<PipelineResult> result = step.step.Wait();
  step.status = result.status();
  if (result.ok()) step.loss = result->loss;
}

absl::StatusOr<at::Tensor> PipelineSteps::Finish() {
  if (in_flight_.empty()) return absl::FailedPreconditionError("no step was started");
  InFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  Wait(step);
  DG_RETURN_IF_ERROR(step.status);
  return step.loss;
}

}  // namespace distgrad
