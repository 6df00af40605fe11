// What an averager does with the gradients of contexts.
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/autograd/context_record.h"
#include "core/base/status.h"
#include "core/parallel/process_group/gradient_averager_impl.h"
#include "core/tensor/exception.h"

namespace distgrad {

// A context that is followed, as the context knows it: it ends after the context's release, when
// the record itself may be gone, and another one in its place.
class GradientAverager::Impl::Following {
 public:
  Following(std::weak_ptr<Impl> averager, const ContextRecord& context)
      : averager_(std::move(averager)), id_(context.id()), place_(&context) {}
  ~Following() {
    if (done_) return;
    if (const auto averager = averager_.lock()) averager->OnContextEnd(*this);
  }
  void OnGradient(const ContextRecord& context, const at::Tensor& leaf) {
    // The averager may be the one that calls, from under its mutex.
    if (done_) return;
    if (const auto averager = averager_.lock()) averager->OnContextGradient(*this, context, leaf);
  }
  // The averager no longer follows, and need not be told of the end.
  void SetDone() { done_ = true; }

  ContextId id() const { return id_; }
  // Workers of one process may have records of the same context.
  bool Is(const ContextRecord& context) const { return place_ == &context && id_ == context.id(); }

 private:
  const std::weak_ptr<Impl> averager_;
  const ContextId id_;
  const void* const place_;
  std::atomic<bool> done_{false};
};

bool GradientAverager::Impl::Follows(const ContextRecord& context) const {
  return followed_.has_value() && followed_->following->Is(context);
}

void GradientAverager::Impl::Unfollow() {
  if (followed_.has_value()) followed_->following->SetDone();
  followed_.reset();
}

absl::Status GradientAverager::Impl::GiveUpFollowed() {
  if (!followed_.has_value()) return absl::OkStatus();
  const size_t begun = followed_->round.begun();
  if (begun > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", followed_->following->id(), " was given up when ", begun, " of ",
                     plan_.buckets().size(), " buckets of it were being averaged"));
  }
  Unfollow();  // the others have seen nothing of it
  return absl::OkStatus();
}

void GradientAverager::Impl::FailFollowed() {
  const absl::Status given_up = GiveUpFollowed();
  if (!given_up.ok()) group_->Fail(given_up);
  Unfollow();
}

void GradientAverager::Impl::OnContextEnd(const Following& following) {
  absl::MutexLock lock(&mu_);
  if (followed_.has_value() && followed_->following == &following) FailFollowed();
}

absl::StatusOr<std::vector<at::Tensor>> GradientAverager::Impl::GradientsOf(
    const ContextRecord& context) const {
  std::vector<at::Tensor> leaves;
  for (const auto& parameter : plan_.parameters()) leaves.push_back(parameter.tensor);
  return context.GradientsOf(leaves);
}

absl::Status GradientAverager::Impl::AverageInBackward(ContextRecord& context) {
  const auto following = std::make_shared<Following>(weak_from_this(), context);
  {
    absl::MutexLock lock(&mu_);
    DG_RETURN_IF_ERROR(Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
      DG_RETURN_IF_ERROR(GiveUpFollowed());
      if (round_.has_value()) {
        return absl::FailedPreconditionError("a backward that gives .grad is being averaged");
      }
      followed_.emplace(Followed{following.get(), AveragingRound(plan_, &spare_),
                                 std::vector<bool>(plan_.parameters().size()), AllMissing()});
      return absl::OkStatus();
    }));
  }
  // It may end the one that the context had of another averager.
  context.SetLeafObserver(
      [following, &context](const at::Tensor& leaf) { following->OnGradient(context, leaf); });
  return absl::OkStatus();
}

void GradientAverager::Impl::OnContextGradient(const Following& following,
                                               const ContextRecord& context,
                                               const at::Tensor& leaf) {
  const auto known = numbers_.find(leaf.unsafeGetTensorImpl());
  if (known == numbers_.end()) return;
  absl::MutexLock lock(&mu_);
  if (!followed_.has_value() || followed_->following != &following) return;
  const absl::Status status = Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
    auto& [unused, round, touched, missing] = *followed_;
    const size_t bucket = plan_.bucket_of(known->second);
    if (round.begun() > bucket) {
      return absl::FailedPreconditionError(absl::StrCat(
          "'", plan_.parameters()[known->second].name, "' got another gradient in context ",
          context.id(),
          " when it had been averaged already; AverageInBackward is for one backward"));
    }
    if (!touched[known->second]) --missing[bucket];
    touched[known->second] = true;
    if (missing[round.begun()] > 0) return absl::OkStatus();
    const absl::StatusOr<std::vector<at::Tensor>> gradients = GradientsOf(context);
    if (!gradients.ok()) return GiveUpFollowed();  // it was released meanwhile
    while (round.begun() < missing.size() && missing[round.begun()] == 0) {
      DG_RETURN_IF_ERROR(round.Begin(*gradients, touched));
    }
    return absl::OkStatus();
  });
  if (!status.ok()) throw StatusError(status);
}

absl::Status GradientAverager::Impl::Average(ContextRecord& context) {
  absl::MutexLock lock(&mu_);
  return Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
    const bool follows = Follows(context);
    if (!follows) DG_RETURN_IF_ERROR(GiveUpFollowed());
    AveragingRound round = follows ? std::move(followed_->round) : AveragingRound(plan_, &spare_);
    Unfollow();
    if (follows) context.SetLeafObserver(nullptr);
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients, GradientsOf(context));
    std::vector<bool> touched;
    for (const at::Tensor& gradient : gradients) touched.push_back(gradient.defined());
    return Finish(context, round, gradients, touched);
  });
}

absl::Status GradientAverager::Impl::Finish(ContextRecord& context, AveragingRound& round,
                                            const std::vector<at::Tensor>& gradients,
                                            const std::vector<bool>& touched) {
  DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> averages, round.Finish(gradients, touched));
  for (size_t k = 0; k < averages.size(); ++k) {
    const at::Tensor& parameter = plan_.parameters()[k].tensor;
    if (!averages[k].defined()) continue;
    if (gradients[k].defined()) {
      DG_RETURN_IF_ERROR(context.SetGradient(parameter, averages[k]));
    } else {
      context.AddToGradient(parameter, averages[k]);
    }
  }
  DG_RETURN_IF_ERROR(FollowActive(round));
  return CheckFrozen();
}

absl::StatusOr<bool> GradientAverager::Impl::Join(ContextRecord& context,
                                                  const JoinOptions& options) {
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(group_->status());
  DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients, GradientsOf(context));
  for (size_t k = 0; k < gradients.size() && !options.keep_gradients; ++k) {
    if (!gradients[k].defined()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "Join(): context ", context.id(), " has a gradient of '", plan_.parameters()[k].name,
        "' already; give a new context for each step, or, for further averages in one step, "
        "keep_gradients"));
  }
  bool any = false;
  DG_RETURN_IF_ERROR(Guarded([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
    DG_RETURN_IF_ERROR(GiveUpFollowed());
    const std::vector<bool> untouched(gradients.size(), false);
    AveragingRound round(plan_, &spare_, /*active=*/false);
    DG_RETURN_IF_ERROR(round.Begin(gradients, untouched));
    DG_ASSIGN_OR_RETURN(any, AnyActive(round));
    return any ? Finish(context, round, gradients, untouched) : absl::OkStatus();
  }));
  return any;
}

}  // namespace distgrad
