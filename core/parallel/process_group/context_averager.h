// The half of an averager that averages the gradients which contexts have: after a pass, or as the
// pass gives them.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_CONTEXT_AVERAGER_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_CONTEXT_AVERAGER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/autograd/context_record.h"
#include "core/parallel/process_group/averaging_plan.h"
#include "core/parallel/process_group/averaging_round.h"
#include "core/parallel/process_group/averaging_sequence.h"

namespace distgrad {

// Thread-safe. Its state is guarded by the sequence's mutex.
class ContextAverager : public AveragingSequence::Driver {
 public:
  // What it is given outlives it.
  ContextAverager(const AveragingPlan& plan, AveragingSequence& sequence);

  // An average in a backward that is open fails the group.
  void Close();

  // Whether a tensor is one of the parameters.
  bool Averages(const at::Tensor& tensor) const {
    return numbers_.contains(tensor.unsafeGetTensorImpl());
  }

  // The functions of GradientAverager.
  absl::Status Average(ContextRecord& context);
  absl::Status AverageInBackward(ContextRecord& context, std::weak_ptr<ContextAverager> self);
  absl::StatusOr<bool> Join(ContextRecord& context, bool keep_gradients);

  // AveragingSequence::Driver
  absl::Status GiveUp() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  void Drop() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());

 private:
  class Following;
  // A context whose gradients are averaged as they come.
  struct Followed {
    Following* following;  // whose end comes here first
    AveragingRound round;
    std::vector<bool> touched;    // by parameter
    std::vector<size_t> missing;  // gradients, by bucket
  };

  // Take calls of the context's passes, which fail with the StatusError that is thrown, and of its
  // release.
  void OnGradient(const Following& following, const ContextRecord& context, const at::Tensor& leaf);
  void OnContextEnd(const Following& following);

  // Whether the other ranks have seen something of the context that is followed.
  bool HasBegun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Fails the group if averages of the context that is followed have begun.
  void FailFollowed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());
  // Returns kFailedPrecondition for the first gradient that there is.
  absl::Status CheckMayJoin(const ContextRecord& context,
                            const std::vector<at::Tensor>& gradients) const;
  // Averages the gradients of a context with what has begun.
  absl::Status Finish(ContextRecord& context, AveragingRound& round,
                      const std::vector<at::Tensor>& gradients, const std::vector<bool>& touched)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence_.mu());

  // Constant after construction.
  const AveragingPlan& plan_;
  AveragingSequence& sequence_;
  std::vector<at::Tensor> leaves_;                               // by parameter
  absl::flat_hash_map<const c10::TensorImpl*, size_t> numbers_;  // of the parameters

  // Guarded by the sequence's mutex.
  std::optional<Followed> followed_ ABSL_GUARDED_BY(sequence_.mu());
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_CONTEXT_AVERAGER_H_
