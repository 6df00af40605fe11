// The communicators that a process keeps, one for each list of devices.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_NCCL_POOL_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_NCCL_POOL_H_

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/deadline.h"
#include "core/parallel/nccl/nccl_communicators.h"

namespace distgrad {

// Communicators take long to set up and hold memory of their devices. So the kMostIdle lists that
// were used last are kept, whatever bucket sizes and time-outs they are used with; others last as
// long as somebody has them. All have one order. Thread-safe.
class NcclPool {
 public:
  // How many lists are kept that nobody has.
  static constexpr size_t kMostIdle = 8;

  explicit NcclPool(NcclPlatform platform, Clock* clock = nullptr)
      : platform_(std::move(platform)), clock_(clock) {}

  // Those of this list of devices, or new ones if there are none or they have failed: these wait
  // for their turn, and then for NCCL, `timeout` at most each time.
  absl::StatusOr<std::shared_ptr<NcclCommunicators>> Get(const std::vector<c10::Device>& devices,
                                                         absl::Duration timeout);
  // Has all leave (NcclCommunicators::TryLeave()), for the end of the process, and those that are
  // made later. Where something does not end by the deadline, the process ends all the same.
  void Leave(Deadline deadline = Deadline::After(absl::Seconds(2)));

 private:
  using List = std::list<std::shared_ptr<NcclCommunicators>>;

  // Null if there are none; those that have failed go to `dropped`.
  std::shared_ptr<NcclCommunicators> Find(const std::vector<c10::Device>& devices, List* dropped);
  // Takes those out that are kept for nobody and are too many.
  List Superfluous() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const NcclPlatform platform_;
  Clock* const clock_;
  const std::shared_ptr<NcclOrder> order_ = std::make_shared<NcclOrder>();

  absl::Mutex mu_;
  List known_ ABSL_GUARDED_BY(mu_);  // the one used last is the first
  bool left_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_NCCL_POOL_H_
