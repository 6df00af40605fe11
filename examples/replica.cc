// Takes a step of a replica: forward and backward as in one process, on a part of the batch.
#include "examples/replica.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "torch/optim/sgd.h"

namespace distgrad {

absl::StatusOr<std::unique_ptr<ReplicaLearner>> ReplicaLearner::Create(
    std::shared_ptr<ProcessGroup> group, uint64_t seed) {
  DG_ASSIGN_OR_RETURN(Stage model, Stage::Create(0, 1, seed));
  std::unique_ptr<ReplicaLearner> learner(new ReplicaLearner(std::move(group), std::move(model)));
  std::vector<NamedTensor> parameters;
  for (const at::Tensor& parameter : learner->parameters()) {
    parameters.push_back({absl::StrCat("parameter ", parameters.size()), parameter});
  }
  DG_ASSIGN_OR_RETURN(learner->averager_,
                      GradientAverager::Create(learner->group_, std::move(parameters), {}));
  return learner;
}

ReplicaLearner::ReplicaLearner(std::shared_ptr<ProcessGroup> group, Stage model)
    : group_(std::move(group)),
      model_(std::move(model)),
      optimizer_(std::make_unique<torch::optim::SGD>(
          model_.parameters(), torch::optim::SGDOptions(/*lr=*/0).momentum(kMomentum))) {}

ReplicaLearner::~ReplicaLearner() = default;

absl::StatusOr<double> ReplicaLearner::Step(const Batch& batch, double learning_rate) {
  const int64_t ranks = group_->size(), rank = group_->rank();
  const int64_t begin = batch.size() * rank / ranks, end = batch.size() * (rank + 1) / ranks;
  // The ranks' parts may differ by a row, and the last batch may be smaller than the group. So each
  // loss is this rank's share of the batch's mean, times the ranks that the average divides by.
  const double share =
      static_cast<double>((end - begin) * ranks) / static_cast<double>(batch.size());
  try {
    optimizer_->zero_grad();
    at::Tensor loss = at::zeros({});
    if (begin < end) {
      loss = Loss(model_.Forward(batch.images.slice(0, begin, end)),
                  batch.labels.slice(0, begin, end)) *
             share;
      loss.backward();  // ends when .grad are the averages
    } else {
      DG_RETURN_IF_ERROR(averager_->Average());
    }
    optimizer_->param_groups()[0].options().set_lr(learning_rate);
    optimizer_->step();
    const at::Tensor mean = loss.detach();
    DG_RETURN_IF_ERROR(group_->Average({mean}));
    return mean.item<double>();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::StatusOr<at::Tensor> ReplicaLearner::Predict(const at::Tensor& images) {
  const c10::NoGradGuard no_grad;
  return model_.Forward(images);
}

}  // namespace distgrad
