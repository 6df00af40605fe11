// Joins the rendezvous, and makes the group from what it says.
#include "core/worker/join_process_group.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "core/base/blocking.h"
#include "core/base/deadline.h"
#include "core/base/status.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<ProcessGroup>> JoinProcessGroup(
    ProcessGroupOptions options, const RendezvousOptions& rendezvous_options) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(options.host, SaidHost(options.host));
  const Deadline deadline = Deadline::After(options.join_timeout);
  DG_ASSIGN_OR_RETURN(Rendezvous rendezvous, JoinRendezvous(rendezvous_options, deadline));
  if (options.host.empty()) {
    DG_ASSIGN_OR_RETURN(options.host, DefaultHost(rendezvous.place));
  }
  options.store = std::move(rendezvous.store);
  options.cluster_key = std::move(rendezvous.cluster_key);
  options.certificates = std::move(rendezvous.certificates);
  options.rank = rendezvous.place.rank;
  options.size = rendezvous.place.world_size;
  // What is left of it; one that is too short to be one stays, and is refused.
  options.join_timeout = std::max(std::min(options.join_timeout, absl::Milliseconds(1)),
                                  absl::Trunc(deadline.Left(), absl::Milliseconds(1)));
  return ProcessGroup::Create(std::move(options));
}

}  // namespace distgrad
