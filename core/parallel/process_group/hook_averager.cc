// Averages what backwards leave in .grad.
#include "core/parallel/process_group/hook_averager.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/parallel/bucket.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

// Whether nobody can tell if another tensor takes its place in its parameter: it and its memory are
// known there alone, and to our list.
bool IsPrivate(const at::Tensor& gradient) {
  return gradient.use_count() == 2 && gradient.storage().use_count() == 1 &&
         !gradient.requires_grad();
}

// Which of the gradients, by parameter, share memory with another one, or their elements with each
// other: libtorch leaves the former where a backward gives two parameters the same values. What
// would be written to one would be the other's, too. Parts of a program's own buffer do not: they
// lie side by side, or as columns between each other.
std::vector<bool> Overlapping(const std::vector<at::Tensor>& gradients) {
  struct Place {
    uintptr_t begin, end;
    size_t parameter;
  };
  std::vector<bool> overlapping(gradients.size());
  std::vector<Place> places;
  for (size_t k = 0; k < gradients.size(); ++k) {
    const at::Tensor& gradient = gradients[k];
    if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0) continue;
    overlapping[k] = at::has_internal_overlap(gradient) == at::MemOverlap::Yes;
    const auto begin = reinterpret_cast<uintptr_t>(gradient.const_data_ptr());
    // Of one with gaps, in which others may be, the first element is looked at.
    const bool is_dense = gradient.is_non_overlapping_and_dense();
    places.push_back({begin, begin + (is_dense ? gradient.nbytes() : gradient.itemsize()), k});
  }
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.begin < b.begin; });
  // Of those before, the one that ends last.
  const Place* last = nullptr;
  for (const Place& place : places) {
    if (last != nullptr && place.begin < last->end) {
      overlapping[last->parameter] = overlapping[place.parameter] = true;
    }
    if (last == nullptr || place.end > last->end) last = &place;
  }
  return overlapping;
}

bool IsZero(const at::Tensor& gradient) {
  const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
  return at::count_nonzero(values).item<int64_t>() == 0;
}

}  // namespace

HookAverager::HookAverager(const AveragingPlan& plan, AveragingSequence& sequence, bool in_backward)
    : plan_(plan),
      sequence_(sequence),
      in_backward_(in_backward),
      touched_(plan_.parameters().size(), false),
      seen_(plan_.parameters().size(), Unseen()),
      left_(plan_.parameters().size(), Unseen()) {
  sequence_.Add(this);
}

void HookAverager::AddHooks(std::weak_ptr<HookAverager> self) {
  self_ = self;
  std::vector<at::Tensor> parameters;
  for (const NamedTensor& each : plan_.parameters()) parameters.push_back(each.tensor);
  hooks_.Add(parameters, std::move(self));
}

void HookAverager::Close() {
  hooks_.Remove();
  absl::MutexLock lock(&sequence_.mu());
  if (round_.has_value()) FailRound("the averager was destroyed in the middle of a backward");
  round_.reset();
}

// -------------------------------------------------------------------------------------- Backward

HookAverager::Seen HookAverager::SeenOf(const at::Tensor& gradient) {
  std::optional<int64_t> version = 0;
  if (gradient.defined()) {
    if (gradient.is_inference()) {
      version.reset();
    } else {
      version = static_cast<int64_t>(gradient._version());
    }
  }
  return {c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
              gradient.getIntrusivePtr()),
          version};
}

void HookAverager::OnGradient(size_t parameter, const at::Tensor& tensor) {
  absl::MutexLock lock(&sequence_.mu());
  touched_[parameter] = true;
  const size_t bucket = plan_.bucket_of(parameter);
  const Seen seen = SeenOf(tensor.grad());
  // The average would take the place of what has been added to it.
  const bool is_late = round_.has_value() && round_->begun() > bucket && seen_[parameter] != seen;
  if (no_sync_ > 0 && !is_late) return;
  if (!HasBegun()) ThrowIfError(sequence_.MayBegin());
  ThrowIfError(sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) {
    DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
    if (!round_.has_value()) OpenRound();
    if (!AwaitBackwardEnd()) return absl::InternalError("a hook was called outside of a backward");
    if (is_late) {
      return absl::FailedPreconditionError(absl::StrCat(
          "'", plan_.parameters()[parameter].name,
          "' got another gradient in one backward when it had been averaged already; let "
          "GradientAverager::NoSync live during this backward, and call Average() after it"));
    }
    if (round_->begun() > bucket) return absl::OkStatus();
    if (seen_[parameter] == Unseen()) --missing_[bucket];
    seen_[parameter] = seen;
    if (missing_[round_->begun()] > 0) return absl::OkStatus();
    while (round_->begun() < missing_.size() && missing_[round_->begun()] == 0) {
      DG_RETURN_IF_ERROR(round_->Begin(GradientsIn(round_->begun()), touched_));
    }
    return absl::OkStatus();
  }));
}

bool HookAverager::AwaitBackwardEnd() {
  const int backward = RunningBackward();
  if (backward == -1) return false;
  if (std::find(backwards_.begin(), backwards_.end(), backward) == backwards_.end()) {
    ObserveBackwardEnd(self_);
    backwards_.push_back(backward);
  }
  return true;
}

bool HookAverager::Forget(int backward) {
  if (!round_.has_value()) return false;
  const auto known = std::find(backwards_.begin(), backwards_.end(), backward);
  if (known == backwards_.end()) return false;
  backwards_.erase(known);
  return true;
}

void HookAverager::OnBackwardEnd(int backward) {
  absl::MutexLock lock(&sequence_.mu());
  // libtorch runs one that is deep within others on another thread, where its end does not tell
  // that it is within them. The last to end is the outermost of those that are known of.
  if (!Forget(backward) || !backwards_.empty()) return;
  if (!HasBegun()) {
    const absl::Status may_begin = sequence_.MayBegin();
    if (!may_begin.ok()) round_.reset();  // the next backward has its own
    ThrowIfError(may_begin);
  }
  ThrowIfError(
      sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) { return FinishRound(); }));
}

void HookAverager::OnNestedBackwardEnd(int backward) {
  absl::MutexLock lock(&sequence_.mu());
  if (!Forget(backward)) return;
  // The outer backward may reach no parameter by itself, and so have no hook that asks for its end.
  // An error is the group's, and so that of whatever comes next: this is called by a destructor.
  (void)sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) {
    if (!AwaitBackwardEnd()) {
      FailRound(
          "a backward within another one ended on a thread where the other one does not run, so "
          "that its end cannot be seen (let GradientAverager::NoSync live during it, and call "
          "Average() after it)");
    }
    return sequence_.group().status();
  });
}

void HookAverager::OnBackwardAbandoned(int backward) {
  absl::MutexLock lock(&sequence_.mu());
  // Those around it fail, too, or go on because the failure was caught.
  if (!Forget(backward) || !backwards_.empty()) return;
  if (HasBegun()) FailRound("a backward failed");
  round_.reset();
}

absl::Status HookAverager::GiveUp() {
  if (!round_.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "another average was asked for while a backward that gives .grad is being averaged; end that "
      "backward first");
}

// ---------------------------------------------------------------------------------------- Rounds

bool HookAverager::HasBegun() const { return round_.has_value() && round_->begun() > 0; }

void HookAverager::OpenRound(bool active) {
  round_.emplace(sequence_.NewRound(active));
  backwards_.clear();
  seen_.assign(plan_.parameters().size(), Unseen());
  missing_ = plan_.bucket_sizes();
}

void HookAverager::FailRound(const char* what) {
  std::string last;  // where one may look for what failed
  for (size_t k = 0; k < seen_.size(); ++k) {
    if (seen_[k] != Unseen()) last = plan_.parameters()[k].name;
  }
  sequence_.group().Fail(absl::FailedPreconditionError(
      absl::StrCat(what, " when ", round_->begun(), " of ", plan_.buckets().size(),
                   " buckets were being averaged, after the gradient of '", last, "'")));
}

void HookAverager::TouchWhatWasSet() {
  for (size_t k = 0; k < touched_.size(); ++k) {
    if (plan_.bucket_of(k) < round_->begun()) continue;  // the others have been told of it
    const at::Tensor& gradient = plan_.parameters()[k].tensor.grad();
    if (gradient.defined() && left_[k] != SeenOf(gradient)) touched_[k] = true;
  }
}

at::Tensor HookAverager::GradientOf(size_t parameter) {
  const at::Tensor& gradient = plan_.parameters()[parameter].tensor.grad();
  // What a backward that failed, or one under NoSync, had left there was not wanted.
  if (!gradient.defined()) touched_[parameter] = false;
  return gradient;
}

std::vector<at::Tensor> HookAverager::Gradients() {
  std::vector<at::Tensor> gradients;
  for (size_t k = 0; k < plan_.parameters().size(); ++k) gradients.push_back(GradientOf(k));
  return gradients;
}

std::vector<at::Tensor> HookAverager::GradientsIn(size_t bucket) {
  std::vector<at::Tensor> gradients(plan_.parameters().size());
  for (const Bucket::Slot& slot : plan_.buckets()[bucket].slots) {
    gradients[slot.tensor] = GradientOf(slot.tensor);
  }
  return gradients;
}

absl::Status HookAverager::FinishRound() {
  TouchWhatWasSet();
  const std::vector<at::Tensor> gradients = Gradients();
  DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> averages, round_->Finish(gradients, touched_));
  const std::vector<bool> overlapping = Overlapping(gradients);
  for (const Bucket& bucket : plan_.buckets()) {
    std::vector<at::Tensor> to, from;
    for (const Bucket::Slot& slot : bucket.slots) {
      const at::Tensor& gradient = gradients[slot.tensor];
      const at::Tensor& average = averages[slot.tensor];
      if (!average.defined()) continue;
      // Outside of inference mode nobody may write to a gradient of that.
      if (gradient.defined() && gradient.layout() == at::kStrided && bucket.flat &&
          !gradient.is_inference() && !overlapping[slot.tensor] && !IsPrivate(gradient)) {
        to.push_back(gradient);
        from.push_back(average);
      } else {
        plan_.parameters()[slot.tensor].tensor.mutable_grad() = average;
      }
    }
    CopyMany(to, from);
  }
  DG_RETURN_IF_ERROR(sequence_.EndRound(*round_));
  round_.reset();
  touched_.assign(touched_.size(), false);
  for (size_t k = 0; k < left_.size(); ++k) {
    if (averages[k].defined()) left_[k] = SeenOf(plan_.parameters()[k].tensor.grad());
  }
  return absl::OkStatus();
}

absl::Status HookAverager::Average() {
  absl::MutexLock lock(&sequence_.mu());
  if (!HasBegun()) DG_RETURN_IF_ERROR(sequence_.MayBegin());
  return sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) {
    DG_RETURN_IF_ERROR(GiveUp());
    for (size_t k = 0; !in_backward_ && k < touched_.size(); ++k) {
      touched_[k] = plan_.parameters()[k].tensor.grad().defined();
    }
    DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
    OpenRound();
    return FinishRound();
  });
}

// ------------------------------------------------------------------------------------------ Join

absl::Status HookAverager::CheckMayJoin(bool keep_gradients) const {
  for (size_t k = 0; k < plan_.parameters().size(); ++k) {
    const auto& [name, tensor, sparse] = plan_.parameters()[k];
    const at::Tensor& gradient = tensor.grad();
    if (!gradient.defined()) continue;
    const bool is_left = left_[k] == SeenOf(gradient);
    // Without hooks nobody else knows of a gradient that is still to be averaged.
    const bool may_be_new = touched_[k] || (!in_backward_ && !is_left);
    // One that was set to zero, by zero_grad(false) say, has been reset.
    if (may_be_new && !IsZero(gradient)) {
      return absl::FailedPreconditionError(
          absl::StrCat("Join(): '", name,
                       "' has a gradient that is still to be averaged; call Average() before, or "
                       "reset it"));
    }
    // It may have been changed since, by clipping, say.
    if (!keep_gradients && (is_left || !IsZero(gradient))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "Join(): '", name,
          is_left ? "' still has the gradient of the last average"
                  : "' has a gradient that no backward since the last average has given: that "
                    "average's, changed since, or one that the program has set itself",
          "; call zero_grad() where the other ranks do, or, for further averages in one step, give "
          "keep_gradients"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> HookAverager::Join(bool keep_gradients) {
  absl::MutexLock lock(&sequence_.mu());
  if (!HasBegun()) DG_RETURN_IF_ERROR(sequence_.MayBegin());
  absl::Status wrong;  // of the gradients: the group goes on
  bool any = false;
  DG_RETURN_IF_ERROR(
      sequence_.Run([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) -> absl::Status {
        // The gradients of a backward that runs are not to be looked at.
        DG_RETURN_IF_ERROR(GiveUp());
        wrong = CheckMayJoin(keep_gradients);
        if (!wrong.ok()) return absl::OkStatus();
        DG_RETURN_IF_ERROR(sequence_.GiveUpOthers(this));
        // They are as before where nobody had input for this average.
        std::vector<bool> touched = touched_;
        OpenRound(/*active=*/false);
        TouchWhatWasSet();
        DG_RETURN_IF_ERROR(round_->Begin(Gradients(), touched_));
        DG_ASSIGN_OR_RETURN(any, sequence_.AnyActive(*round_));
        if (any) return FinishRound();
        round_.reset();
        touched_ = std::move(touched);
        return absl::OkStatus();
      }));
  DG_RETURN_IF_ERROR(wrong);
  return any;
}

void HookAverager::AddToNoSync(int amount) {
  absl::MutexLock lock(&sequence_.mu());
  no_sync_ += amount;
}

}  // namespace distgrad
