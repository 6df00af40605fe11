// Takes steps of SGD on the whole network, and predicts with it.
#include "examples/single.h"

#include "c10/core/GradMode.h"
#include "examples/devices.h"
#include "examples/interrupt.h"
#include "torch/optim/sgd.h"

namespace distgrad {

absl::Status TrainSingle(const Options& options) {
  CatchInterrupts();
  absl::StatusOr<std::unique_ptr<Training>> training = Training::Create(options);
  if (!training.ok()) return training.status();
  const absl::StatusOr<at::Device> device = DeviceOf(options.device, {});
  if (!device.ok()) return device.status();
  SingleLearner learner(options.seed, *device);
  return (*training)->Run(learner);
}

SingleLearner::SingleLearner(uint64_t seed, at::Device device)
    : model_(*Stage::Create(0, 1, seed, device)),
      optimizer_(std::make_unique<torch::optim::SGD>(
          model_.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum))) {}

SingleLearner::~SingleLearner() = default;

absl::StatusOr<double> SingleLearner::Step(const Batch& batch, double learning_rate) {
  optimizer_->zero_grad();
  const at::Tensor loss = Loss(model_.Forward(batch.images), batch.labels);
  loss.backward();
  optimizer_->param_groups()[0].options().set_lr(learning_rate);
  optimizer_->step();
  return loss.item<double>();
}

absl::StatusOr<at::Tensor> SingleLearner::Predict(const at::Tensor& images) {
  const c10::NoGradGuard no_grad;
  return model_.Forward(images);
}

}  // namespace distgrad
