// Tells the agent which incarnation of a worker there is now, and where. Implementation:
// core/membership/lookups.h, which asks the job's store; tests have their own.
#ifndef DISTGRAD_CORE_MEMBERSHIP_DIRECTORY_H_
#define DISTGRAD_CORE_MEMBERSHIP_DIRECTORY_H_

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/membership/worker_info.h"

namespace distgrad {

// Thread-safe.
class Directory {
 public:
  using Found = absl::AnyInvocable<void(absl::StatusOr<WorkerInfo>)>;

  virtual ~Directory() = default;

  // Looks up a worker, and returns at once. `found` is called exactly once, on any thread, with no
  // lock held: kNotFound if there was never such a worker, kDeadlineExceeded if there is no answer
  // for `patience`.
  virtual void Find(WorkerRank worker, absl::Duration patience, Found found) = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_DIRECTORY_H_
