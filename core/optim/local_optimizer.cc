// Puts a context's gradients into .grad for one step, under the parameters' mutexes.
#include "core/optim/local_optimizer.h"

#include <ATen/ops/norm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/optim/optimizer.h>

#include <bitset>
#include <cmath>
#include <memory>
#include <set>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "core/autograd/context_record.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/base/blocking.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

// Parameters belong to the process, and so do their locks: several optimizers, also of several
// workers, may hold the same ones. Each is locked by one of a few mutexes, by its memory.
constexpr size_t kLocks = 64;
absl::Mutex* Locks() {
  static absl::Mutex* const locks = new absl::Mutex[kLocks];
  return locks;
}

// Locks in a BlockingScope where it has to wait: for a step that may wait for a hook, which may
// wait for a call to this worker.
void LockForStep(absl::Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) {
  if (mu.TryLock()) return;
  const BlockingScope blocking;
  mu.Lock();
}

class ABSL_SCOPED_LOCKABLE OptimizerLock {
 public:
  explicit OptimizerLock(absl::Mutex* mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(*mu) {
    LockForStep(mu_);
  }
  ~OptimizerLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  OptimizerLock(const OptimizerLock&) = delete;
  OptimizerLock& operator=(const OptimizerLock&) = delete;

 private:
  absl::Mutex& mu_;
};

// Locks all parameters of an optimizer. In one order, so that no two wait for each other.
class ParametersLock {
 public:
  explicit ParametersLock(const torch::optim::Optimizer& optimizer) {
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const void* const memory =
            parameter.has_storage()
                ? static_cast<const void*>(parameter.storage().unsafeGetStorageImpl())
                : parameter.unsafeGetTensorImpl();
        held_.set(absl::HashOf(memory) % kLocks);
      }
    }
    for (size_t i = 0; i < kLocks; ++i) {
      if (held_[i]) LockForStep(Locks()[i]);
    }
  }
  ~ParametersLock() {
    for (size_t i = 0; i < kLocks; ++i) {
      if (held_[i]) Locks()[i].Unlock();
    }
  }
  ParametersLock(const ParametersLock&) = delete;
  ParametersLock& operator=(const ParametersLock&) = delete;

 private:
  std::bitset<kLocks> held_;
};

// Each once: one that the optimizer has twice has one gradient.
std::vector<at::Tensor> ParametersOf(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
    }
  }
  return parameters;
}

absl::Status Removed() { return absl::NotFoundError("this worker's part was removed"); }

}  // namespace

absl::Status CheckMayAwaitStep() {
  // Of ours; and of libtorch's own backward, which calls hooks within the leaf's node.
  const std::shared_ptr<torch::autograd::Node> current = torch::autograd::get_current_node();
  const torch::autograd::Node* const node = current.get();
  const bool in_leaf = node != nullptr && typeid(*node) == typeid(torch::autograd::AccumulateGrad);
  if (!in_leaf && !IsCallingPostAccumulateHook()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "a post-accumulate hook cannot wait for a step, which may wait for its leaf; step an "
      "optimizer of libtorch's own for that leaf there, or step when the backward is over");
}

LocalOptimizer::LocalOptimizer(std::unique_ptr<torch::optim::Optimizer> optimizer)
    : optimizer_(std::move(optimizer)) {}
LocalOptimizer::~LocalOptimizer() = default;

absl::Status LocalOptimizer::Step(const ContextRecord& context,
                                  std::optional<double> learning_rate) {
  DG_RETURN_IF_ERROR(CheckMayAwaitStep());
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  const ParametersLock parameters_lock(*optimizer_);
  const std::vector<at::Tensor> parameters = ParametersOf(*optimizer_);
  // A pass may call a post-accumulate hook of a parameter now, for which it has its own gradient in
  // .grad.
  const LeavesLock leaves_lock(parameters);
  std::vector<at::Tensor> before;
  absl::Status status;
  try {
    // The state that it makes is stepped in any mode.
    const c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    // All of them before anything changes: a context may be released meanwhile.
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients, context.GradientsOf(parameters));
    for (const at::Tensor& parameter : parameters) before.push_back(parameter.grad());
    for (torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) {
      if (learning_rate.has_value()) group.options().set_lr(*learning_rate);
    }
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
    optimizer_->step();
  } catch (...) {
    status = Annotate(StatusFromException(std::current_exception()),
                      absl::StrCat("optimizer step of context ", context.id()));
  }
  for (size_t i = 0; i < before.size(); ++i) parameters[i].mutable_grad() = std::move(before[i]);
  return status;
}

absl::Status LocalOptimizer::SetLearningRate(double learning_rate) {
  if (!std::isfinite(learning_rate) || learning_rate < 0)
    return absl::InvalidArgumentError(absl::StrCat("the learning rate is ", learning_rate));
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  for (torch::optim::OptimizerParamGroup& group : optimizer_->param_groups())
    group.options().set_lr(learning_rate);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StateTensor>> LocalOptimizer::State() {
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  return ReadState(*optimizer_);
}

absl::Status LocalOptimizer::LoadState(const std::vector<StateTensor>& state) {
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  return distgrad::LoadState(state, optimizer_.get());
}

absl::Status LocalOptimizer::Use(absl::FunctionRef<absl::Status(torch::optim::Optimizer&)> use) {
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  return use(*optimizer_);
}

bool LocalOptimizer::Remove() {
  std::unique_ptr<torch::optim::Optimizer> removed;  // ends outside the lock
  const OptimizerLock lock(&mu_);
  removed.swap(optimizer_);
  removed_.store(true, std::memory_order_release);
  return removed != nullptr;
}

bool LocalOptimizer::removed() const { return removed_.load(std::memory_order_acquire); }

absl::StatusOr<std::vector<at::Tensor>> LocalOptimizer::GradientNorms(
    const ContextRecord& context) {
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  const ParametersLock parameters_lock(*optimizer_);
  std::vector<at::Tensor> norms;
  try {
    at::NoGradGuard no_grad;
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients,
                        context.GradientsInNorms(ParametersOf(*optimizer_)));
    for (const at::Tensor& gradient : gradients) {
      if (gradient.defined()) norms.push_back(at::norm(gradient).to(at::kCPU));
    }
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return norms;
}

absl::Status LocalOptimizer::ScaleGradients(ContextRecord& context, const at::Tensor& factor) {
  const OptimizerLock lock(&mu_);
  if (optimizer_ == nullptr) return Removed();
  const ParametersLock parameters_lock(*optimizer_);
  const std::vector<at::Tensor> parameters = ParametersOf(*optimizer_);
  try {
    // Passes add to what it sets in any mode.
    const c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients, context.GradientsOf(parameters));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].defined()) continue;
      // Not in place: whoever asked for the gradient before keeps what it was.
      // The factor is of the norm's dtype, which a tensor without dimensions would take over.
      DG_RETURN_IF_ERROR(context.SetGradient(
          parameters[i], gradients[i].mul(factor).to(gradients[i].scalar_type())));
    }
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
  return absl::OkStatus();
}

}  // namespace distgrad
