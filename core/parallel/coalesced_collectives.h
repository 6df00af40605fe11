// Reduction by copying buckets between devices and adding them: for any devices, and the same one
// several times.
#ifndef DISTGRAD_CORE_PARALLEL_COALESCED_COLLECTIVES_H_
#define DISTGRAD_CORE_PARALLEL_COALESCED_COLLECTIVES_H_

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/parallel/device_collectives.h"

namespace distgrad {

// Collectives whose calls only launch, and wait for nothing: so there is nothing to time out. Sums
// do not depend on the buckets: each is ((t0 + t1) + t2) + ..., and so the same on every run.
//
// Thread-safe.
class CoalescedCollectives : public DeviceCollectives {
 public:
  // `devices` is not empty.
  CoalescedCollectives(std::vector<c10::Device> devices, DeviceCollectivesOptions options);

  const std::vector<c10::Device>& devices() const override { return devices_; }
  absl::StatusOr<TensorVector> Reduce(absl::Span<const TensorVector> lists,
                                      c10::Device destination) override;
  absl::StatusOr<std::vector<TensorVector>> Broadcast(const TensorVector& tensors) override;
  void Abort(const absl::Status& why) override;

 private:
  absl::Status Aborted() const;

  // Constant after construction.
  const std::vector<c10::Device> devices_;
  const DeviceCollectivesOptions options_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  absl::Status aborted_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_COALESCED_COLLECTIVES_H_
