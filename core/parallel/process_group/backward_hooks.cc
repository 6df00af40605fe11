// Registers hooks on parameters and callbacks with libtorch's engine.
#include "core/parallel/process_group/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "core/autograd/executor/post_accumulate.h"

namespace distgrad {
namespace {

namespace autograd_impl = torch::autograd::impl;

using torch::autograd::PostAccumulateGradHook;

// What libtorch calls at the end of a backward, and drops without a call if that fails.
class Ending {
 public:
  explicit Ending(std::weak_ptr<BackwardObserver> observer)
      : observer_(std::move(observer)), backward_(RunningBackward()) {}
  // libtorch drops it in the thread that called the backward, where an outer one is current again,
  // which goes on if a failure of this one is caught.
  ~Ending() {
    const bool is_over = state_ == State::kNotTaken || state_ == State::kEnded;
    const auto observer = is_over ? nullptr : observer_.lock();
    if (observer == nullptr) return;
    if (state_ == State::kNestedEnded || IsWithinAnother()) {
      observer->OnNestedBackwardEnd(backward_);
    } else {
      observer->OnBackwardAbandoned(backward_);
    }
  }
  // libtorch has it.
  void SetTaken() { state_ = State::kRunning; }
  void Call() {
    // A backward within a node of another one: that one ends later.
    const bool nested = IsWithinAnother();
    state_ = nested ? State::kNestedEnded : State::kEnded;
    const auto observer = nested ? nullptr : observer_.lock();
    if (observer != nullptr) observer->OnBackwardEnd(backward_);
  }

 private:
  enum class State { kNotTaken, kRunning, kNestedEnded, kEnded };

  static bool IsWithinAnother() { return torch::autograd::get_current_node() != nullptr; }

  const std::weak_ptr<BackwardObserver> observer_;
  const int backward_;
  State state_ = State::kNotTaken;
};

}  // namespace

// Comes after whatever hook the parameter had, and does nothing once the observer is gone.
class BackwardHooks::Hook : public GradHook {
 public:
  Hook(std::weak_ptr<BackwardObserver> observer, size_t parameter,
       std::unique_ptr<PostAccumulateGradHook> earlier)
      : observer_(std::move(observer)), parameter_(parameter), earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (earlier_ != nullptr) (*earlier_)(tensor);
    // A context's backward keeps the gradient, and has it in .grad only while it calls hooks.
    if (IsCallingPostAccumulateHookOf(tensor)) return;
    // libtorch calls hooks of leaves that get no gradient, too.
    if (!tensor.grad().defined()) return;
    if (const auto observer = observer_.lock()) observer->OnGradient(parameter_, tensor);
  }

  PostAccumulateGradHook* earlier() const override { return earlier_.get(); }
  std::unique_ptr<PostAccumulateGradHook> TakeEarlier() { return std::move(earlier_); }

 private:
  const std::weak_ptr<BackwardObserver> observer_;
  const size_t parameter_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;
};

void BackwardHooks::Add(const std::vector<at::Tensor>& parameters,
                        std::weak_ptr<BackwardObserver> observer) {
  for (size_t k = 0; k < parameters.size(); ++k) {
    auto hook = std::make_unique<Hook>(
        observer, k, std::move(autograd_impl::post_acc_grad_hooks(parameters[k])));
    hooks_.emplace_back(parameters[k], hook.get());
    autograd_impl::set_post_acc_grad_hooks(parameters[k], std::move(hook));
  }
}

void BackwardHooks::Remove() {
  for (const auto& [parameter, ours] : hooks_) {
    auto& hook = autograd_impl::post_acc_grad_hooks(parameter);
    if (hook.get() == ours) hook = static_cast<Hook&>(*hook).TakeEarlier();
  }
  hooks_.clear();
}

int RunningBackward() { return torch::autograd::get_current_graph_task_id(); }

void ObserveBackwardEnd(std::weak_ptr<BackwardObserver> observer) {
  auto ending = std::make_shared<Ending>(std::move(observer));
  // If it throws, it has dropped what it was given.
  torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->Call(); });
  ending->SetTaken();
}

}  // namespace distgrad
