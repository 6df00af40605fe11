// Lends a leaf its gradient as .grad while its post-accumulate hook runs.
#include "core/autograd/executor/post_accumulate.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "core/base/blocking.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;

// Names what nodes let only their own kind see.
struct NodeMutex : AccumulateGrad {
  static std::mutex& Of(AccumulateGrad& leaf) { return leaf.*&NodeMutex::mutex_; }
};

std::unique_lock<std::mutex> Lock(AccumulateGrad& leaf) {
  std::unique_lock<std::mutex> lock(NodeMutex::Of(leaf), std::try_to_lock);
  if (!lock.owns_lock()) {
    // A hook, which may be waiting for another worker, is running.
    const BlockingScope blocking;
    lock.lock();
  }
  return lock;
}

torch::autograd::PostAccumulateGradHook* HookOf(const AccumulateGrad& leaf) {
  torch::autograd::PostAccumulateGradHook* hook = leaf.tensor_post_acc_grad_hooks().get();
  while (const auto* ours = dynamic_cast<const GradHook*>(hook)) hook = ours->earlier();
  return hook;
}

class GradInPlace;
thread_local const GradInPlace* innermost = nullptr;

// While it lives, the leaf's .grad is another one.
class GradInPlace {
 public:
  GradInPlace(const at::Tensor& leaf, at::Tensor gradient)
      : leaf_(leaf),
        own_(std::exchange(leaf.mutable_grad(), std::move(gradient))),
        outer_(std::exchange(innermost, this)) {}
  ~GradInPlace() {
    innermost = outer_;
    leaf_.mutable_grad() = std::move(own_);
  }
  GradInPlace(const GradInPlace&) = delete;
  GradInPlace& operator=(const GradInPlace&) = delete;

  at::Tensor Take() { return std::move(leaf_.mutable_grad()); }
  // Whether it is one of this and those around it.
  bool HasPlaceIn(const at::Tensor& leaf) const {
    return leaf_.is_same(leaf) || (outer_ != nullptr && outer_->HasPlaceIn(leaf));
  }

 private:
  const at::Tensor& leaf_;
  at::Tensor own_;
  const GradInPlace* const outer_;
};

}  // namespace

bool IsCallingPostAccumulateHook() { return innermost != nullptr; }

bool IsCallingPostAccumulateHookOf(const at::Tensor& leaf) {
  return innermost != nullptr && innermost->HasPlaceIn(leaf);
}

bool HasPostAccumulateHook(const AccumulateGrad& leaf) { return HookOf(leaf) != nullptr; }

LeavesLock::LeavesLock(absl::Span<const at::Tensor> leaves) {
  for (const at::Tensor& leaf : leaves) {
    if (!leaf.is_leaf() || !leaf.requires_grad()) continue;
    nodes_.push_back(torch::autograd::impl::grad_accumulator(leaf));
  }
  std::sort(nodes_.begin(), nodes_.end());
  nodes_.erase(std::unique(nodes_.begin(), nodes_.end()), nodes_.end());
  for (const auto& node : nodes_) Lock(static_cast<AccumulateGrad&>(*node)).release();
}

LeavesLock::~LeavesLock() {
  for (const auto& node : nodes_) NodeMutex::Of(static_cast<AccumulateGrad&>(*node)).unlock();
}

void CallPostAccumulateHook(AccumulateGrad& leaf, absl::FunctionRef<at::Tensor()> accumulate,
                            absl::FunctionRef<void(at::Tensor)> keep) {
  const std::unique_lock<std::mutex> lock = Lock(leaf);
  GradInPlace grad(leaf.variable, accumulate());
  // It may have been taken off while this thread waited.
  if (auto* const hook = HookOf(leaf); hook != nullptr) (*hook)(leaf.variable);
  keep(grad.Take());
}

}  // namespace distgrad
