// Joins the rendezvous, and makes the group from what it says.
#include "core/worker/join_process_group.h"

#include <utility>

#include "absl/time/clock.h"
#include "core/base/blocking.h"
#include "core/base/status.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<ProcessGroup>> JoinProcessGroup(
    ProcessGroupOptions options, const RendezvousOptions& rendezvous_options) {
  const BlockingScope blocking;
  DG_ASSIGN_OR_RETURN(options.host, SaidHost(options.host));
  DG_ASSIGN_OR_RETURN(Rendezvous rendezvous,
                      JoinRendezvous(rendezvous_options, Deadline::After(options.join_timeout)));
  if (options.host.empty()) {
    DG_ASSIGN_OR_RETURN(options.host, DefaultHost(rendezvous.place));
  }
  options.store = std::move(rendezvous.store);
  options.cluster_key = std::move(rendezvous.cluster_key);
  options.certificates = std::move(rendezvous.certificates);
  options.rank = rendezvous.place.rank;
  options.size = rendezvous.place.world_size;
  return ProcessGroup::Create(std::move(options));
}

}  // namespace distgrad
