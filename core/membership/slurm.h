// Slurm's ways to write lists, as srun puts them into environment variables.
#ifndef DISTGRAD_CORE_MEMBERSHIP_SLURM_H_
#define DISTGRAD_CORE_MEMBERSHIP_SLURM_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Returns the first host of a node list: "gpu012" of "gpu[012-015,020],login1", "r1n3" of
// "r[1-2]n[3-4]". kInvalidArgument for what is no such list.
absl::StatusOr<std::string> FirstSlurmHost(absl::string_view node_list);

// Returns whether a node list names one host only.
bool IsOneSlurmHost(absl::string_view node_list);

// Returns the entry of node `node` in a list like SLURM_TASKS_PER_NODE: 4 for nodes 0 to 2 of
// "4(x3),1", and 1 for node 3. kInvalidArgument for what is no such list, or too short.
absl::StatusOr<int> SlurmTasksOfNode(absl::string_view tasks_per_node, int node);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_SLURM_H_
