// Has the hooks by which an averager follows libtorch's backward, and its public face.
#include "core/parallel/process_group/gradient_averager.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/base/status.h"
#include "core/parallel/process_group/gradient_averager_impl.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

namespace autograd_impl = torch::autograd::impl;

using torch::autograd::PostAccumulateGradHook;

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

// Whether nobody can tell if another tensor takes its place in its parameter: it and its memory are
// known there alone, and to our list.
bool IsPrivate(const at::Tensor& gradient) {
  return gradient.use_count() == 2 && gradient.storage().use_count() == 1 &&
         !gradient.requires_grad();
}

bool IsZero(const at::Tensor& gradient) {
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  return at::count_nonzero(values).item<int64_t>() == 0;
}

}  // namespace

GradientAverager::Impl::Seen GradientAverager::Impl::SeenOf(const at::Tensor& gradient) {
  return gradient.defined() ? Seen(gradient.unsafeGetTensorImpl(), gradient._version()) : Seen();
}

// --------------------------------------------------------------------------------------- Hooks

// Comes after whatever hook the parameter had, and does nothing once the averager is gone.
class GradientAverager::Impl::Hook : public GradHook {
 public:
  Hook(std::weak_ptr<Impl> averager, size_t parameter,
       std::unique_ptr<PostAccumulateGradHook> earlier)
      : averager_(std::move(averager)), parameter_(parameter), earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (earlier_ != nullptr) (*earlier_)(tensor);
    if (const auto averager = averager_.lock()) averager->OnGradient(parameter_, tensor);
  }

  PostAccumulateGradHook* earlier() const override { return earlier_.get(); }
  std::unique_ptr<PostAccumulateGradHook> TakeEarlier() { return std::move(earlier_); }

 private:
  const std::weak_ptr<Impl> averager_;
  const size_t parameter_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;
};

// What libtorch calls at the end of a backward, and drops without a call if that fails.
class GradientAverager::Impl::Ending {
 public:
  explicit Ending(std::weak_ptr<Impl> averager) : averager_(std::move(averager)) {}
  // libtorch drops it in the thread that called the backward, where an outer one is current again,
  // which goes on if a failure of this one is caught.
  ~Ending() {
    const bool is_over = state_ == State::kNotTaken || state_ == State::kEnded;
    const auto averager = is_over ? nullptr : averager_.lock();
    if (averager == nullptr) return;
    if (state_ == State::kNestedEnded || IsWithinAnother()) {
      averager->OnNestedBackwardEnd();
    } else {
      averager->OnBackwardAbandoned();
    }
  }
  // libtorch has it.
  void SetTaken() { state_ = State::kRunning; }
  void Call() {
    // A backward within a node of another one: that one ends later.
    const bool nested = IsWithinAnother();
    state_ = nested ? State::kNestedEnded : State::kEnded;
    const auto averager = nested ? nullptr : averager_.lock();
    if (averager != nullptr) averager->OnBackwardEnd();
  }

 private:
  enum class State { kNotTaken, kRunning, kNestedEnded, kEnded };

  static bool IsWithinAnother() { return torch::autograd::get_current_node() != nullptr; }

  const std::weak_ptr<Impl> averager_;
  State state_ = State::kNotTaken;
};

void GradientAverager::Impl::AddHooks() {
  for (size_t k = 0; k < plan_.parameters().size(); ++k) {
    const at::Tensor& parameter = plan_.parameters()[k].tensor;
    auto hook = std::make_unique<Hook>(weak_from_this(), k,
                                       std::move(autograd_impl::post_acc_grad_hooks(parameter)));
    hooks_.push_back(hook.get());
    autograd_impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  }
}

void GradientAverager::Impl::RemoveHooks() {
  for (size_t k = 0; k < hooks_.size(); ++k) {
    const at::Tensor& parameter = plan_.parameters()[k].tensor;
    auto& hook = autograd_impl::post_acc_grad_hooks(parameter);
    // Below another one it stays, and does nothing.
    if (hook.get() == hooks_[k]) hook = static_cast<Hook&>(*hook).TakeEarlier();
  }
}

void GradientAverager::Impl::OnGradient(size_t parameter, const at::Tensor& tensor) {
  // A context's backward keeps the gradient, and has it in .grad only while it calls hooks.
  if (IsCallingPostAccumulateHookOf(tensor)) return;
  // libtorch calls hooks of leaves that get no gradient, too.
  if (!tensor.grad().defined()) return;
  absl::MutexLock lock(&mu_);
  touched_[parameter] = true;
  if (no_sync_ > 0) return;
  ThrowIfError(Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    DG_RETURN_IF_ERROR(GiveUpFollowed());
    if (!round_.has_value()) OpenRound();
    if (!AwaitBackwardEnd()) return absl::InternalError("a hook was called outside of a backward");
    const size_t bucket = plan_.bucket_of(parameter);
    const Seen seen = SeenOf(tensor.grad());
    if (round_->begun() > bucket) {
      if (seen_[parameter] == seen) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(
          "'", plan_.parameters()[parameter].name,
          "' got another gradient in one backward when it had been averaged already; let "
          "GradientAverager::NoSync live during this backward, and call Average() after it"));
    }
    if (seen_[parameter] == Seen()) --missing_[bucket];
    seen_[parameter] = seen;
    if (missing_[round_->begun()] > 0) return absl::OkStatus();
    while (round_->begun() < missing_.size() && missing_[round_->begun()] == 0) {
      DG_RETURN_IF_ERROR(round_->Begin(GradientsIn(round_->begun()), touched_));
    }
    return absl::OkStatus();
  }));
}

bool GradientAverager::Impl::AwaitBackwardEnd() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return false;
  if (std::find(tasks_.begin(), tasks_.end(), task) == tasks_.end()) {
    auto ending = std::make_shared<Ending>(weak_from_this());
    // If it throws, it has dropped what it was given.
    torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->Call(); });
    ending->SetTaken();
    tasks_.push_back(task);
  }
  return true;
}

void GradientAverager::Impl::OnBackwardEnd() {
  absl::MutexLock lock(&mu_);
  if (round_.has_value()) {
    ThrowIfError(Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return FinishRound(); }));
  }
}

void GradientAverager::Impl::OnNestedBackwardEnd() {
  absl::MutexLock lock(&mu_);
  if (!round_.has_value()) return;
  // The outer backward may reach no parameter by itself, and so have no hook that asks for its end.
  // An error is the group's, and so that of whatever comes next: this is called by a destructor.
  (void)Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!AwaitBackwardEnd()) {
      FailRound(
          "a backward within another one ended on a thread where the other one does not run, so "
          "that its end cannot be seen (let GradientAverager::NoSync live during it, and call "
          "Average() after it)");
    }
    return group_->status();
  });
}

void GradientAverager::Impl::OnBackwardAbandoned() {
  absl::MutexLock lock(&mu_);
  // Before its first bucket the others have seen nothing of it.
  if (round_.has_value() && round_->begun() > 0) FailRound("a backward failed");
  round_.reset();
}

void GradientAverager::Impl::OnAveragerEnd() {
  absl::MutexLock lock(&mu_);
  if (round_.has_value()) FailRound("the averager was destroyed in the middle of a backward");
  round_.reset();
  FailFollowed();
}

// -------------------------------------------------------------------------------------- Rounds

void GradientAverager::Impl::OpenRound(bool active) {
  round_.emplace(plan_, &spare_, active);
  tasks_.clear();
  seen_.assign(plan_.parameters().size(), Seen());
  missing_ = AllMissing();
}

std::vector<size_t> GradientAverager::Impl::AllMissing() const {
  std::vector<size_t> missing;
  for (const Bucket& bucket : plan_.buckets()) missing.push_back(bucket.slots.size());
  return missing;
}

void GradientAverager::Impl::FailRound(const char* what) {
  std::string last;  // where one may look for what failed
  for (size_t k = 0; k < seen_.size(); ++k) {
    if (seen_[k] != Seen()) last = plan_.parameters()[k].name;
  }
  group_->Fail(absl::FailedPreconditionError(
      absl::StrCat(what, " when ", round_->begun(), " of ", plan_.buckets().size(),
                   " buckets were being averaged, after the gradient of '", last, "'")));
}

// An error of one rank leaves the others waiting, so nothing can go on after any.
absl::Status GradientAverager::Impl::Guarded(absl::FunctionRef<absl::Status()> body) {
  absl::Status status = group_->status();
  if (status.ok()) {
    try {
      status = body();
    } catch (...) {
      status = StatusFromException(std::current_exception());
    }
    if (!status.ok()) {
      group_->Fail(Annotate(status, "averaging gradients"));
      status = group_->status();
    }
  }
  if (!status.ok()) {
    round_.reset();
    Unfollow();
  }
  return status;
}

at::Tensor GradientAverager::Impl::GradientOf(size_t parameter) {
  const at::Tensor& gradient = plan_.parameters()[parameter].tensor.grad();
  // What a backward that failed, or one under NoSync, had left there was not wanted.
  if (!gradient.defined()) touched_[parameter] = false;
  return gradient;
}

std::vector<at::Tensor> GradientAverager::Impl::Gradients() {
  std::vector<at::Tensor> gradients;
  for (size_t k = 0; k < plan_.parameters().size(); ++k) gradients.push_back(GradientOf(k));
  return gradients;
}

std::vector<at::Tensor> GradientAverager::Impl::GradientsIn(size_t bucket) {
  std::vector<at::Tensor> gradients(plan_.parameters().size());
  for (const Bucket::Slot& slot : plan_.buckets()[bucket].slots) {
    gradients[slot.tensor] = GradientOf(slot.tensor);
  }
  return gradients;
}

absl::Status GradientAverager::Impl::CheckFrozen() const {
  for (const NamedTensor& each : frozen_) {
    if (!each.tensor.requires_grad()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "'", each.name, "' was frozen when the averager was made, and now requires grad"));
  }
  return absl::OkStatus();
}

absl::Status GradientAverager::Impl::FinishRound() {
  const std::vector<at::Tensor> gradients = Gradients();
  DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> averages, round_->Finish(gradients, touched_));
  for (const Bucket& bucket : plan_.buckets()) {
    std::vector<at::Tensor> to, from;
    for (const Bucket::Slot& slot : bucket.slots) {
      const at::Tensor& gradient = gradients[slot.tensor];
      const at::Tensor& average = averages[slot.tensor];
      if (!average.defined()) continue;
      if (gradient.defined() && gradient.layout() == at::kStrided && bucket.flat &&
          !IsPrivate(gradient)) {
        to.push_back(gradient);
        from.push_back(average);
      } else {
        plan_.parameters()[slot.tensor].tensor.mutable_grad() = average;
      }
    }
    CopyMany(to, from);
  }
  DG_RETURN_IF_ERROR(FollowActive(*round_));
  round_.reset();
  touched_.assign(touched_.size(), false);
  for (size_t k = 0; k < seen_.size(); ++k) {
    seen_[k] = SeenOf(plan_.parameters()[k].tensor.grad());
  }
  return CheckFrozen();
}

absl::Status GradientAverager::Impl::FollowActive(AveragingRound& round) {
  DG_ASSIGN_OR_RETURN(active_, round.Active());
  if (buffers_.empty()) return absl::OkStatus();
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& each : buffers_) tensors.push_back(each.tensor);
  return group_->Broadcast(tensors, LowestActive());
}

int GradientAverager::Impl::LowestActive() const {
  return active_.defined() ? active_.gt(0).to(at::kInt).argmax().item<int>() : 0;
}

absl::Status GradientAverager::Impl::Average() {
  absl::MutexLock lock(&mu_);
  return Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!options_.in_backward) {
      for (size_t k = 0; k < touched_.size(); ++k) {
        touched_[k] = plan_.parameters()[k].tensor.grad().defined();
      }
    }
    DG_RETURN_IF_ERROR(GiveUpFollowed());
    if (!round_.has_value()) OpenRound();
    return FinishRound();
  });
}

// --------------------------------------------------------------------------------------- Join

absl::StatusOr<bool> GradientAverager::Impl::AnyActive(AveragingRound& round) {
  DG_ASSIGN_OR_RETURN(const at::Tensor active, round.Active());
  if (active.gt(0).any().item<bool>()) return true;
  DG_RETURN_IF_ERROR(BroadcastState(LowestActive()));
  return false;
}

absl::Status GradientAverager::Impl::CheckMayJoin(const JoinOptions& options) const {
  for (size_t k = 0; k < plan_.parameters().size(); ++k) {
    const auto& [name, tensor, sparse] = plan_.parameters()[k];
    const at::Tensor& gradient = tensor.grad();
    if (!gradient.defined()) continue;
    const bool is_seen = seen_[k] == SeenOf(gradient);
    // Without hooks nobody else knows of a gradient that is still to be averaged.
    const bool may_be_new = touched_[k] || (!options_.in_backward && !is_seen);
    // One that was set to zero, by zero_grad(false) say, has been reset.
    if (may_be_new && !IsZero(gradient)) {
      return absl::FailedPreconditionError(
          absl::StrCat("Join(): '", name,
                       "' has a gradient that is still to be averaged; call Average() before, or "
                       "reset it"));
    }
    // It may have been changed since, by clipping, say.
    if (!options.keep_gradients && (is_seen || !IsZero(gradient))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "Join(): '", name,
          "' still has the gradient of the last average; call zero_grad() where the other ranks "
          "do, or, for further averages in one step, give keep_gradients"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> GradientAverager::Impl::Join(const JoinOptions& options) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(group_->status());
  DG_RETURN_IF_ERROR(CheckMayJoin(options));
  bool any = false;
  DG_RETURN_IF_ERROR(Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
    DG_RETURN_IF_ERROR(GiveUpFollowed());
    if (round_.has_value()) {
      return absl::FailedPreconditionError("Join() was called in the middle of a backward");
    }
    OpenRound(/*active=*/false);
    DG_RETURN_IF_ERROR(round_->Begin(Gradients(), touched_));
    DG_ASSIGN_OR_RETURN(any, AnyActive(*round_));
    if (any) return FinishRound();
    round_.reset();
    return absl::OkStatus();
  }));
  return any;
}

void GradientAverager::Impl::AddToNoSync(int amount) {
  absl::MutexLock lock(&mu_);
  no_sync_ += amount;
}

}  // namespace distgrad