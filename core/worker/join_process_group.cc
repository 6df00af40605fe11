#include "core/worker/join_process_group.h"

#include <utility>

#include "absl/time/clock.h"
#include "core/base/status.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<ProcessGroup>> JoinProcessGroup(ProcessGroupOptions options,
                                                               const MeetingOptions& meeting) {
  DG_ASSIGN_OR_RETURN(options.host, SaidHost(options.host));
  DG_ASSIGN_OR_RETURN(Meeting met, Meet(meeting, Deadline::After(options.join_timeout)));
  if (options.host.empty()) {
    DG_ASSIGN_OR_RETURN(options.host, DefaultHost(met.place));
  }
  options.store = std::move(met.store);
  options.rank = met.place.rank;
  options.size = met.place.world_size;
  return ProcessGroup::Create(std::move(options));
}

}  // namespace distgrad
