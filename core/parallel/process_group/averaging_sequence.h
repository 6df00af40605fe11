// The averages that one averager makes, one after the other, in the same order as the other ranks.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_SEQUENCE_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_SEQUENCE_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/parallel/process_group/averaging_plan.h"
#include "core/parallel/process_group/averaging_round.h"
#include "core/parallel/process_group/process_group.h"
#include "core/parallel/process_group/replicated_tensors.h"

namespace distgrad {

// Thread-safe. Its mutex orders the averages and guards the state of those that make them; it is
// held while torch copies and while ranks are waited for.
class AveragingSequence {
 public:
  // A maker of averages: of what is in .grad, or of what contexts have. Called under mu().
  class Driver {
   public:
    virtual ~Driver() = default;
    // Ends the average that is open, if there is one, before another driver begins one. An error if
    // it cannot be ended: the other ranks have their parts of it.
    virtual absl::Status GiveUp() = 0;
    // Forgets the average that is open: the group has failed.
    virtual void Drop() = 0;
  };

  // What it is given outlives it.
  AveragingSequence(std::shared_ptr<ProcessGroup> group, const AveragingPlan& plan,
                    const ReplicatedTensors& tensors)
      : group_(std::move(group)), plan_(plan), tensors_(tensors) {}

  // Adds a driver, before the first average.
  void Add(Driver* driver) { drivers_.push_back(driver); }

  absl::Mutex& mu() ABSL_LOCK_RETURNED(mu_) { return mu_; }
  ProcessGroup& group() const { return *group_; }

  // OK if this thread may begin an average now, or if the group has failed, of which Run() tells.
  // Else why it may not: then nothing has failed. To be asked before the first part of an average
  // of which the other ranks have seen nothing.
  absl::Status MayBegin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Runs a part of an average. An error, or what `part` throws, fails the group, for it would leave
  // the other ranks waiting; and nothing runs once the group has failed.
  absl::Status Run(absl::FunctionRef<absl::Status()> part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Has all other drivers give up, before an average of `driver`.
  absl::Status GiveUpOthers(const Driver* driver) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // `active`: this rank has input, and is not only here for the others.
  AveragingRound NewRound(bool active = true) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return AveragingRound(plan_, &spare_, active);
  }
  // Gives all ranks the buffers of the lowest one that was active; after each round.
  absl::Status EndRound(AveragingRound& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether any rank is active in a round whose first bucket has begun. If none is, all get the
  // parameters and buffers of the lowest one that was so last.
  absl::StatusOr<bool> AnyActive(AveragingRound& round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

 private:
  int LowestActive() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // Constant once averages are made.
  const std::shared_ptr<ProcessGroup> group_;
  const AveragingPlan& plan_;
  const ReplicatedTensors& tensors_;
  std::vector<Driver*> drivers_;

  absl::Mutex mu_;
  std::vector<at::Tensor> spare_ ABSL_GUARDED_BY(mu_);  // buffers of buckets, for the next round
  at::Tensor active_ ABSL_GUARDED_BY(mu_);  // by rank, in the last round that had any such
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_SEQUENCE_H_
