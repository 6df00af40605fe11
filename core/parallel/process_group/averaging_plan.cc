// Assigns gradients to buckets, with room for the notes behind them.
#include "core/parallel/process_group/averaging_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace distgrad {

AveragingPlan::AveragingPlan(std::shared_ptr<ProcessGroup> group,
                             std::vector<NamedTensor> parameters, size_t bucket_bytes,
                             size_t first_bucket_bytes, bool divide_by_active)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      divide_by_active_(divide_by_active),
      bucket_of_(parameters_.size()) {
  std::vector<at::Tensor> dense(parameters_.size());
  for (size_t k = 0; k < parameters_.size(); ++k) {
    if (!parameters_[k].sparse_gradient) dense[k] = parameters_[k].tensor;
  }
  buckets_ = AssignBuckets(dense, bucket_bytes, first_bucket_bytes, SlotOrder::kRowMajor);
  // The first has the notes of who is active.
  if (buckets_.empty()) buckets_.emplace_back().device = group_->device();
  // They are the first layers as a rule, whose gradients come last.
  for (size_t k = 0; k < parameters_.size(); ++k) {
    const at::Tensor& tensor = parameters_[k].tensor;
    if (!parameters_[k].sparse_gradient) continue;
    buckets_.push_back(
        {tensor.device(), tensor.scalar_type(), /*flat=*/false, 0, {{k, 0, {}, {}}}});
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    notes_.push_back(bucket.elements);
    if (bucket.flat) bucket.elements += static_cast<int64_t>(bucket.slots.size());
    if (b == 0) bucket.elements += group_->size();
    for (const Bucket::Slot& slot : bucket.slots) bucket_of_[slot.tensor] = b;
    what_.push_back(absl::StrCat("averaging bucket ", b + 1, " of ", buckets_.size(), " of "));
    if (bucket.slots.empty()) {
      absl::StrAppend(&what_[b], "no gradients");
    } else {
      absl::StrAppend(&what_[b], bucket.slots.size(), " gradients ('",
                      parameters_[bucket.slots.front().tensor].name, "' to '",
                      parameters_[bucket.slots.back().tensor].name, "')");
    }
  }
}

std::vector<size_t> AveragingPlan::bucket_sizes() const {
  std::vector<size_t> sizes;
  for (const Bucket& bucket : buckets_) sizes.push_back(bucket.slots.size());
  return sizes;
}

}  // namespace distgrad
