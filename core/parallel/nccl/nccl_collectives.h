// Reduction by NCCL.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "core/parallel/bucket.h"
#include "core/parallel/coalesced_collectives.h"
#include "core/parallel/device_collectives.h"
#include "core/parallel/nccl/nccl_communicators.h"

namespace distgrad {

// Collectives run on a stream of their own for each device, which waits for the caller's current
// one; of the callers' streams only those wait for it that have results there, or whose tensors it
// reads in place. So other devices go on computing.
//
// Several of these may share communicators: they take turns, and what aborts one aborts all. What
// NCCL cannot add (sparse tensors, bool, complex and 8-bit floating point numbers) is added by
// CoalescedCollectives.
//
// Thread-safe.
class NcclCollectives final : public DeviceCollectives {
 public:
  NcclCollectives(std::shared_ptr<NcclCommunicators> communicators,
                  DeviceCollectivesOptions options);

  const std::vector<c10::Device>& devices() const override { return communicators_->devices(); }
  // kFailedPrecondition, with nothing launched, while a current stream is captured into a graph.
  absl::StatusOr<TensorVector> Reduce(absl::Span<const TensorVector> lists,
                                      c10::Device destination) override;
  absl::StatusOr<std::vector<TensorVector>> Broadcast(const TensorVector& tensors) override;
  void Abort(const absl::Status& why) override { communicators_->Abort(why); }

  // OK, or why all calls fail.
  absl::Status status() const { return communicators_->status(); }
  const std::shared_ptr<NcclCommunicators>& communicators() const { return communicators_; }

 private:
  using Collective = NcclCommunicators::Collective;

  absl::StatusOr<at::Tensor> ReduceBucket(const Bucket& bucket,
                                          absl::Span<const TensorVector> lists, size_t root);
  absl::Status BroadcastBucket(const Bucket& bucket, const TensorVector& tensors,
                               std::vector<TensorVector>* results);
  size_t IndexOf(c10::Device device) const;  // devices().size() if it is not among them

  // Constant after construction; synchronize themselves.
  const std::shared_ptr<NcclCommunicators> communicators_;
  const DeviceCollectivesOptions options_;
  CoalescedCollectives fallback_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_
