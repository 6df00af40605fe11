// One average of the gradients of a list of parameters over all ranks of a group, bucket by bucket.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_ROUND_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_ROUND_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/parallel/process_group/averaging_plan.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {

// Nothing is recorded; throws as torch does, where it is not a collective that fails. Not
// thread-safe. The plan outlives it.
class AveragingRound {
 public:
  // `active`: this rank has input, and is not only here for the others. `spare` has the buffers of
  // earlier rounds with this plan, and gets those of this one; it outlives it, too.
  AveragingRound(const AveragingPlan& plan, std::vector<at::Tensor>* spare, bool active = true)
      : plan_(plan), spare_(spare), active_(active) {}

  // How many buckets have begun: the first ones.
  size_t begun() const { return sums_.size(); }

  // Begins the next bucket. `all` are the gradients by parameter; only those of this bucket are
  // looked at, and undefined ones are zeros. `touched`: there is a gradient that is to be averaged.
  // One that no rank has touched is left as it is.
  //
  // What a gradient holds of earlier averages is the same on all ranks, and so is its average, if
  // each rank by which the sum is divided has it in the sum, also one that is not active.
  absl::Status Begin(const std::vector<at::Tensor>& all, const std::vector<bool>& touched);

  // Begins all buckets that are left, and waits for all. The averages by parameter; undefined for
  // those that no rank has touched.
  absl::StatusOr<std::vector<at::Tensor>> Finish(const std::vector<at::Tensor>& gradients,
                                                 const std::vector<bool>& touched);

  // Returns by rank a number, more than 0 where it is active. Waits for the first bucket, on its
  // device.
  absl::StatusOr<at::Tensor> Active();

 private:
  at::Tensor Packed(size_t bucket, const std::vector<at::Tensor>& gradients);
  // Returns the bucket's notes, real numbers whatever its dtype.
  at::Tensor Notes(size_t bucket) const;
  absl::Status Await(size_t bucket);
  void Divide(size_t bucket, const std::vector<bool>& touched, int64_t divisor,
              std::vector<at::Tensor>* averages);

  const AveragingPlan& plan_;
  std::vector<at::Tensor>* const spare_;  // by bucket
  const bool active_;
  std::vector<at::Tensor> sums_;                                 // by bucket
  std::vector<std::shared_ptr<ProcessGroup::Running>> running_;  // null once it was waited for
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_ROUND_H_
