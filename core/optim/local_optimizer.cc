#include "core/optim/local_optimizer.h"

#include <ATen/ops/norm.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {

LocalOptimizer::LocalOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer)
    : optimizer_(std::move(optimizer)) {}
LocalOptimizer::~LocalOptimizer() = default;

absl::Status LocalOptimizer::Step(const ContextRecord& context,
                                  std::optional<double> learning_rate) {
  absl::MutexLock lock(&mu_);
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  absl::Status status;
  try {
    at::NoGradGuard no_grad;
    for (torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      if (learning_rate.has_value()) group.options().set_lr(*learning_rate);
      for (at::Tensor& parameter : group.params()) {
        before.emplace_back(parameter, parameter.grad());
        absl::StatusOr<at::Tensor> gradient = context.Gradient(parameter);
        parameter.mutable_grad() = gradient.ok() ? *gradient : at::Tensor();
      }
    }
    optimizer_->step();
  } catch (...) {
    status = Annotate(StatusFromException(std::current_exception()),
                      absl::StrCat("optimizer step of context ", context.id()));
  }
  for (auto& [parameter, grad] : before) parameter.mutable_grad() = std::move(grad);
  return status;
}

absl::StatusOr<std::vector<at::Tensor>> LocalOptimizer::GradientNorms(
    const ContextRecord& context) {
  absl::MutexLock lock(&mu_);
  std::vector<at::Tensor> norms;
  try {
    at::NoGradGuard no_grad;
    for (const torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const absl::StatusOr<at::Tensor> gradient = context.Gradient(parameter);
        if (gradient.ok()) norms.push_back(at::norm(*gradient).to(at::kCPU));
      }
    }
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return norms;
}

absl::Status LocalOptimizer::ScaleGradients(ContextRecord& context, const at::Tensor& factor) {
  absl::MutexLock lock(&mu_);
  try {
    at::NoGradGuard no_grad;
    for (const torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const absl::StatusOr<at::Tensor> gradient = context.Gradient(parameter);
        if (!gradient.ok()) continue;
        // Not in place: whoever asked for the gradient before keeps what it was.
        DG_RETURN_IF_ERROR(context.SetGradient(parameter, gradient->mul(factor)));
      }
    }
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return absl::OkStatus();
}

}  // namespace distgrad
