// The half of an averager that averages .grad: by hooks, while libtorch's backward runs, or when it
// is asked.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_HOOK_AVERAGER_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_HOOK_AVERAGER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/parallel/process_group/averaging_plan.h"
#include "core/parallel/process_group/averaging_round.h"
#include "core/parallel/process_group/averaging_sequence.h"
#include "core/parallel/process_group/backward_hooks.h"

namespace distgrad {

// Thread-safe. Its state is guarded by the sequence's mutex.
class HookAverager : public BackwardObserver, public AveragingSequence::Driver {
 public:
  // What it is given outlives it. `in_backward`: hooks will tell of each gradient.
  HookAverager(const AveragingPlan& plan, AveragingSequence& sequence, bool in_backward);

  // Adds the hooks, which know of `self`, this, as long as it lives. Once.
  void AddHooks(std::weak_ptr<HookAverager> self);
  // Takes the hooks off. An average that is open fails the group.
  void Close();

  // The functions of GradientAverager.
  absl::Status Average();
  absl::StatusOr<bool> Join(bool keep_gradients);
  void AddToNoSync(int amount);

  // BackwardObserver. They throw StatusError.
  void OnGradient(size_t parameter, const at::Tensor& tensor) override;
  void OnBackwardEnd(int backward) override;
  void OnNestedBackwardEnd(int backward) override;
  void OnBackwardAbandoned(int backward) override;

  // AveragingSequence::Driver
  absl::Status GiveUp() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  void Drop() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu()) { round_.reset(); }

 private:
  // A gradient and its version, when it was seen last. One of inference mode has no version, and so
  // is equal to none: it may have been written to.
  struct Seen {
    // Of one that is gone no other one can have the address, then.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient;
    std::optional<int64_t> version;

    bool operator==(const Seen& other) const {
      return version.has_value() &&
             gradient._unsafe_get_target() == other.gradient._unsafe_get_target() &&
             version == other.version;
    }
    bool operator!=(const Seen& other) const { return !(*this == other); }
  };
  static Seen SeenOf(const at::Tensor& gradient);
  static Seen Unseen() { return SeenOf(at::Tensor()); }

  // Whether the other ranks have seen something of the average that is open.
  bool HasBegun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  void OpenRound(bool active = true) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Hears of the end of the backward that this thread runs; false if it runs none.
  bool AwaitBackwardEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // No longer awaits the end of a backward; false if it is none of the round that is open.
  bool Forget(int backward) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Averages .grad with what has begun.
  absl::Status FinishRound() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  void FailRound(const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Marks gradients that no backward gave, as those that a program has set, where their buckets
  // have not begun.
  void TouchWhatWasSet() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Returns the .grad of a parameter. One that has been reset is no longer touched.
  at::Tensor GradientOf(size_t parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Returns the gradients of all parameters, between backwards.
  std::vector<at::Tensor> Gradients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Returns the gradients in a bucket, by parameter. While the backward runs, other threads of it
  // may be changing those that are in no complete bucket.
  std::vector<at::Tensor> GradientsIn(size_t bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  absl::Status CheckMayJoin(bool keep_gradients) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());

  // Constant after AddHooks().
  const AveragingPlan& plan_;
  AveragingSequence& sequence_;
  const bool in_backward_;
  std::weak_ptr<HookAverager> self_;
  BackwardHooks hooks_;

  // Guarded by the sequence's mutex.
  int no_sync_ ABSL_GUARDED_BY(sequence_.mu()) = 0;
  // Whether a gradient has come since they were last averaged, by parameter.
  std::vector<bool> touched_ ABSL_GUARDED_BY(sequence_.mu());
  // The round of the backward that runs.
  std::optional<AveragingRound> round_ ABSL_GUARDED_BY(sequence_.mu());
  // libtorch's numbers of that backward and of those within it, until they end.
  std::vector<int> backwards_ ABSL_GUARDED_BY(sequence_.mu());
  std::vector<size_t> missing_ ABSL_GUARDED_BY(sequence_.mu());  // gradients, by bucket
  // The gradients that this backward has given, by parameter.
  std::vector<Seen> seen_ ABSL_GUARDED_BY(sequence_.mu());
  // Those that the last average of each parameter has left.
  std::vector<Seen> left_ ABSL_GUARDED_BY(sequence_.mu());
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_HOOK_AVERAGER_H_
