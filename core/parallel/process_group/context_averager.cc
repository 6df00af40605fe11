// Averages the gradients of contexts.
#include "core/parallel/process_group/context_averager.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {

// A context that is followed, as the context knows it: it ends after the context's release, when
// the record itself may be gone, and another one in its place.
class ContextAverager::Following {
 public:
  Following(std::weak_ptr<ContextAverager> averager, const ContextRecord& context)
      : averager_(std::move(averager)), id_(context.id()), place_(&context) {}
  ~Following() {
    if (done_) return;
    if (const auto averager = averager_.lock()) averager->OnContextEnd(*this);
  }
  void OnGradient(const ContextRecord& context, const at::Tensor& leaf) {
    // The averager may be the one that calls, from under its mutex.
    if (done_) return;
    if (const auto averager = averager_.lock()) averager->OnGradient(*this, context, leaf);
  }
  // The averager no longer follows, and need not be told of the end.
  void SetDone() { done_ = true; }

  ContextId id() const { return id_; }
  // Workers of one process may have records of the same context.
  bool Is(const ContextRecord& context) const { return place_ == &context && id_ == context.id(); }

 private:
  const std::weak_ptr<ContextAverager> averager_;
  const ContextId id_;
  const void* const place_;
  std::atomic<bool> done_{false};
};

ContextAverager::ContextAverager(const AveragingPlan& plan, AveragingSequence& sequence)
    : plan_(plan), sequence_(sequence) {
  for (const NamedTensor& each : plan_.parameters()) {
    numbers_.emplace(each.tensor.unsafeGetTensorImpl(), leaves_.size());
    leaves_.push_back(each.tensor);
  }
  sequence_.Add(this);
}

void ContextAverager::Close() {
  absl::MutexLock lock(&sequence_.mu());
  FailFollowed();
}

absl::Status ContextAverager::GiveUp() {
  if (!followed_.has_value()) return absl::OkStatus();
  const size_t begun = followed_->round.begun();
  if (begun > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", followed_->following->id(), " was given up when ", begun, " of ",
                     plan_.buckets().size(), " buckets of it were being averaged"));
  }
  Drop();  // the others have seen nothing of it
  return absl::OkStatus();
}

bool ContextAverager::HasBegun() const {
  return followed_.has_value() && followed_->round.begun() > 0;
}

void ContextAverager::Drop() {
  if (followed_.has_value()) followed_->following->SetDone();
  followed_.reset();
}

void ContextAverager::FailFollowed() {
  const absl::Status given_up = GiveUp();
  if (!given_up.ok()) sequence_.group().Fail(given_up);
  Drop();
}

void ContextAverager::OnContextEnd(const Following& following) {
  absl::MutexLock lock(&sequence_.mu());
  if (followed_.has_value() && followed_->following == &following) FailFollowed();
}

absl::Status ContextAverager::AverageInBackward(ContextRecord& context,
                                                std::weak_ptr<ContextAverager> self) {
  const auto following = std::make_shared<Following>(std::move(self), context);
  {
    absl::MutexLock lock(&sequence_.mu());
    DG_RETURN_IF_ERROR(
        sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) -> absl::Status {
          DG_RETURN_IF_ERROR(GiveUp());
          DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
          followed_.emplace(Followed{following.get(), sequence_.NewRound(),
                                     std::vector<bool>(plan_.parameters().size()),
                                     plan_.bucket_sizes()});
          return absl::OkStatus();
        }));
  }
  // It may end the one that the context had of another averager.
  context.SetLeafObserver(
      [following, &context](const at::Tensor& leaf) { following->OnGradient(context, leaf); });
  return absl::OkStatus();
}

void ContextAverager::OnGradient(const Following& following, const ContextRecord& context,
                                 const at::Tensor& leaf) {
  const auto known = numbers_.find(leaf.unsafeGetTensorImpl());
  if (known == numbers_.end()) return;
  absl::MutexLock lock(&sequence_.mu());
  if (!followed_.has_value() || followed_->following != &following) return;
  if (!HasBegun()) {
    const absl::Status may_begin = sequence_.MayBegin();
    if (!may_begin.ok()) throw StatusError(may_begin);
  }
  const absl::Status status = sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                                sequence_.mu()) -> absl::Status {
    auto& [unused, round, touched, missing] = *followed_;
    const size_t bucket = plan_.bucket_of(known->second);
    if (round.begun() > bucket) {
      return absl::FailedPreconditionError(absl::StrCat(
          "'", plan_.parameters()[known->second].name, "' got another gradient in context ",
          context.id(),
          " when it had been averaged already; an average in the backward is for one backward"));
    }
    if (!touched[known->second]) --missing[bucket];
    touched[known->second] = true;
    if (missing[round.begun()] > 0) return absl::OkStatus();
    const absl::StatusOr<std::vector<at::Tensor>> gradients = context.GradientsOf(leaves_);
    if (!gradients.ok()) return GiveUp();  // it was released meanwhile
    while (round.begun() < missing.size() && missing[round.begun()] == 0) {
      DG_RETURN_IF_ERROR(round.Begin(*gradients, touched));
    }
    return absl::OkStatus();
  });
  if (!status.ok()) throw StatusError(status);
}

absl::Status ContextAverager::Average(ContextRecord& context) {
  absl::MutexLock lock(&sequence_.mu());
  if (!HasBegun()) DG_RETURN_IF_ERROR(sequence_.MayBegin());
  return sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) -> absl::Status {
    DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
    const bool follows = followed_.has_value() && followed_->following->Is(context);
    if (!follows) DG_RETURN_IF_ERROR(GiveUp());
    AveragingRound round = follows ? std::move(followed_->round) : sequence_.NewRound();
    Drop();
    if (follows) context.SetLeafObserver(nullptr);
    DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> gradients, context.GradientsOf(leaves_));
    std::vector<bool> touched;
    for (const at::Tensor& gradient : gradients) touched.push_back(gradient.defined());
    return Finish(context, round, gradients, touched);
  });
}

absl::Status ContextAverager::Finish(ContextRecord& context, AveragingRound& round,
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
  return sequence_.EndRound(round);
}

absl::Status ContextAverager::CheckMayJoin(const ContextRecord& context,
                                           const std::vector<at::Tensor>& gradients) const {
  for (size_t k = 0; k < gradients.size(); ++k) {
    if (!gradients[k].defined()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "joining: context ", context.id(), " has a gradient of '", plan_.parameters()[k].name,
        "' already; give a new context for each step, or, for further averages in one step, "
        "keep the gradients"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ContextAverager::Join(ContextRecord& context, bool keep_gradients) {
  absl::MutexLock lock(&sequence_.mu());
  if (!HasBegun()) DG_RETURN_IF_ERROR(sequence_.MayBegin());
  absl::Status wrong;  // of the context: the group goes on
  bool any = false;
  DG_RETURN_IF_ERROR(
      sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) -> absl::Status {
        const absl::StatusOr<std::vector<at::Tensor>> gradients = context.GradientsOf(leaves_);
        wrong = gradients.status();
        if (wrong.ok() && !keep_gradients) wrong = CheckMayJoin(context, *gradients);
        if (!wrong.ok()) return absl::OkStatus();
        DG_RETURN_IF_ERROR(GiveUp());
        DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
        const std::vector<bool> untouched(gradients->size(), false);
        AveragingRound round = sequence_.NewRound(/*active=*/false);
        DG_RETURN_IF_ERROR(round.Begin(*gradients, untouched));
        DG_ASSIGN_OR_RETURN(any, sequence_.AnyActive(round));
        return any ? Finish(context, round, *gradients, untouched) : absl::OkStatus();
      }));
  DG_RETURN_IF_ERROR(wrong);
  return any;
}

}  // namespace distgrad
