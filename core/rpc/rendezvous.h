// How the workers of a job find each other: each publishes who it is under its rank, and waits
// for all others.
#ifndef DISTGRAD_CORE_RPC_RENDEZVOUS_H_
#define DISTGRAD_CORE_RPC_RENDEZVOUS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/rpc/store.h"

namespace distgrad {

struct WorkerInfo {
  WorkerId id = 0;      // its rank
  std::string name;     // unique in the job
  std::string address;  // what its transport listens on
  Incarnation incarnation = 0;
};

// All `world_size` workers, by rank, once every one of them has joined. Call it once per worker
// and store (or PrefixStore: one for each start of the job).
//
// kDeadlineExceeded names the ranks that did not join; kAlreadyExists, on every worker, when
// two claim one rank or one name.
absl::StatusOr<std::vector<WorkerInfo>> Rendezvous(Store& store, const WorkerInfo& self,
                                                   int world_size, absl::Time deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_RENDEZVOUS_H_
