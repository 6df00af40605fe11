// c10d's backends that can be had. The header of each stays in one file.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NEW_BACKEND_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NEW_BACKEND_H_

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"

namespace distgrad {

class Clock;  // core/base/clock.h

struct BackendPlace {
  std::shared_ptr<Store> store;  // of this start of this group alone
  int rank = 0;
  int size = 1;
  absl::Duration timeout;          // of each collective
  absl::Duration connect_timeout;  // to connect to all ranks
  std::string host;                // or interface, that the others can reach this rank at
  ClusterKey cluster_key = {};     // all ranks have one or none; NCCL has no use for it
  std::shared_ptr<Certificates> certificates = nullptr;  // likewise
  Digest group_id = {};  // of AgreeOnSecurity(); NCCL has no use for it, either
  // Not OK: another rank has failed, with its reason. Asks the store; never null.
  std::function<absl::Status()> failed_elsewhere = nullptr;
  // Tells the others why this rank fails, unless another one has said so of itself before.
  std::function<void(const absl::Status&)> tell_failure = nullptr;
  // By which NCCL keeps the deadlines of what nobody waits for, in the place of two clocks of its
  // own; it outlives the backend. For tests.
  Clock* clock = nullptr;
};

struct NewBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  // Ends collectives that wait for a rank to which the connection has broken by now. To be called
  // from time to time while a thread waits; null where the backend notices by itself.
  std::function<void()> end_lost_waits = nullptr;
  // Whether this thread may begin a collective now: if not, its group goes on all the same. Null:
  // it always may.
  std::function<absl::Status()> may_begin = nullptr;
  // Whether to begin a collective may wait for other ranks, as NCCL does that connects to some of
  // them late. Then nothing but collectives of this group waits for it, and abort() ends it.
  bool begins_may_wait = false;
};

// Each connects to all ranks within place.connect_timeout, and throws what c10d throws.
NewBackend NewGlooBackend(const BackendPlace& place);

// The GPU that NCCL would use: this thread's current one. kFailedPrecondition where the build or
// the machine has none; NewNcclBackend() is for where it has one, and uses that one.
absl::StatusOr<c10::Device> NcclDevice();
NewBackend NewNcclBackend(const BackendPlace& place);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NEW_BACKEND_H_
