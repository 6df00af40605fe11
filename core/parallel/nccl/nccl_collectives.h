// Reduction by NCCL.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_

#include <c10/core/Event.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "core/parallel/bucket.h"
#include "core/parallel/coalesced_collectives.h"
#include "core/parallel/device_collectives.h"
#include "core/parallel/nccl/nccl_group.h"

namespace distgrad {

// Runs collectives on a stream of its own for each device, which waits for the caller's current
// one; of the callers' streams only those wait for that that have results there, or whose tensors
// it reads in place. So other devices go on computing.
//
// A communicator that fails, and a collective that does not end in time, is noticed within a tenth
// of a second, whether a thread waits or not; then all communicators are aborted, so that nothing
// hangs on the devices, and this and all later calls fail. What NCCL cannot add (sparse tensors,
// bool, complex and 8-bit floating point numbers) is added by CoalescedCollectives.
//
// Thread-safe.
class NcclCollectives final : public DeviceCollectives {
 public:
  // `devices` are at least two, distinct, of one type that `start` knows. `clock` must outlive the
  // collectives; one of its own if nullptr. Waits until the communicators stand, or
  // options.timeout.
  static absl::StatusOr<std::shared_ptr<NcclCollectives>> Create(std::vector<c10::Device> devices,
                                                                 DeviceCollectivesOptions options,
                                                                 const NcclGroupStarter& start,
                                                                 Clock* clock = nullptr);
  // Waits for what runs on the devices, as long as each may take.
  ~NcclCollectives() override;

  const std::vector<c10::Device>& devices() const override { return devices_; }
  absl::StatusOr<TensorVector> Reduce(absl::Span<const TensorVector> lists,
                                      c10::Device destination) override;
  absl::StatusOr<std::vector<TensorVector>> Broadcast(const TensorVector& tensors) override;
  void Abort(const absl::Status& why) override;

  // Returns OK, or why all calls fail.
  absl::Status status() const;

 private:
  // A collective that was launched.
  struct Running {
    std::string what;
    absl::Time deadline;
    std::vector<c10::Event> ends;  // by device
  };
  // A device's memory for one bucket. In place: it is a tensor of the caller's.
  struct Buffer {
    at::Tensor tensor;
    bool in_place = false;
  };
  // What one collective does, and with what.
  struct Collective;

  NcclCollectives(std::vector<c10::Device> devices, DeviceCollectivesOptions options,
                  std::unique_ptr<Clock> own_clock, Clock* clock);

  absl::StatusOr<at::Tensor> ReduceBucket(const Bucket& bucket,
                                          absl::Span<const TensorVector> lists, size_t root)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  absl::Status BroadcastBucket(const Bucket& bucket, const TensorVector& tensors,
                               std::vector<TensorVector>* results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);
  absl::Status Launch(Collective collective) ABSL_EXCLUSIVE_LOCKS_REQUIRED(turn_);

  size_t IndexOf(c10::Device device) const;  // devices_.size() if it is not among them
  absl::Status AwaitReady(const std::string& what);
  void Watch();
  void Poll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Late(const std::string& what) const;

  // Constant after construction; synchronize themselves.
  const std::vector<c10::Device> devices_;
  const DeviceCollectivesOptions options_;
  const std::string name_;  // "NCCL over cuda:0, cuda:1"
  CoalescedCollectives fallback_;
  std::vector<c10::Stream> streams_;

  // Held through a call: all devices must see collectives in one order.
  absl::Mutex turn_;

  mutable absl::Mutex mu_ ABSL_ACQUIRED_AFTER(turn_);
  // Guarded by mu_. The group is called with mu_ held: it takes one call at a time, none waits, and
  // none calls back.
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<NcclGroup> group_ ABSL_GUARDED_BY(mu_);  // none after it was aborted
  std::deque<Running> running_ ABSL_GUARDED_BY(mu_);
  bool watched_ ABSL_GUARDED_BY(mu_) = false;  // a timer is set or firing
  Clock::TimerId timer_ ABSL_GUARDED_BY(mu_) = 0;

  const std::unique_ptr<Clock> own_clock_;
  Clock* const clock_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_NCCL_COLLECTIVES_H_
