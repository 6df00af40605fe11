// A process group of all processes of a job, started as its workers are.
//
//   auto group = JoinProcessGroup({.name = "trainers"});   // under torchrun, srun, mpirun ...
//
// Under a launcher that serves no store, rank 0 serves one; where the same process has a worker,
// which would serve it too, JoinRendezvous() once and give both the store and the rank.
#ifndef DISTGRAD_CORE_WORKER_JOIN_PROCESS_GROUP_H_
#define DISTGRAD_CORE_WORKER_JOIN_PROCESS_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "core/parallel/process_group/process_group.h"
#include "core/worker/rendezvous.h"

namespace distgrad {

// Joins the group. `options` have no store, rank, size, cluster key and certificates of their own:
// they are those of the rendezvous, for which `options.join_timeout` counts, too. It begins on each
// rank when that one calls this: of the first rank's little may be left to connect when the last
// one comes. Returns the first error of JoinRendezvous() and ProcessGroup::Create().
absl::StatusOr<std::shared_ptr<ProcessGroup>> JoinProcessGroup(
    ProcessGroupOptions options = {}, const RendezvousOptions& rendezvous_options = {});

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_JOIN_PROCESS_GROUP_H_
