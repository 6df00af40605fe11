// The gradients that are averaged together, and their order: the same on all ranks of a group.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_PLAN_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/parallel/bucket.h"
#include "core/parallel/process_group/named_tensor.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {

// The parameters that are averaged together, in the order in which all ranks do. Immutable after
// construction.
//
// Behind the gradients a bucket has notes, which are summed like them: for each of its parameters
// how many ranks have a gradient of it, and in the first bucket for each rank whether it is active.
// So no collective is needed to find out what is used nowhere, or which ranks are left.
class AveragingPlan {
 public:
  // Gradients are expected from the first parameter to the last.
  AveragingPlan(std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
                size_t bucket_bytes, size_t first_bucket_bytes, bool divide_by_active);

  ProcessGroup& group() const { return *group_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // How many gradients each of them waits for.
  std::vector<size_t> bucket_sizes() const;
  // Sums are divided by the number of active ranks, rather than by that of all.
  bool divide_by_active() const { return divide_by_active_; }
  // What is done with it, for messages.
  const std::string& what(size_t bucket) const { return what_[bucket]; }
  size_t bucket_of(size_t parameter) const { return bucket_of_[parameter]; }
  // Where the notes begin, in elements, of a flat bucket.
  int64_t notes(size_t bucket) const { return notes_[bucket]; }

 private:
  const std::shared_ptr<ProcessGroup> group_;
  const std::vector<NamedTensor> parameters_;
  const bool divide_by_active_;
  std::vector<Bucket> buckets_;
  std::vector<std::string> what_;
  std::vector<size_t> bucket_of_;
  std::vector<int64_t> notes_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_AVERAGING_PLAN_H_
