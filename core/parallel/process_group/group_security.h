// The agreement of the ranks of a group, before they connect, on what protects their connections.
//
// With a key Gloo has other connections than without, and ranks that differ, or have different
// keys, would wait for each other until the end of their time. So each rank says in the store what
// it has, rank 0 compares, and all get its verdict. Keys themselves are not told: of each there is
// an HMAC over a number that is new with each rank.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GROUP_SECURITY_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GROUP_SECURITY_H_

#include <string>

#include "absl/status/statusor.h"
#include "core/base/deadline.h"
#include "core/membership/store.h"
#include "core/net/cluster_key.h"

namespace distgrad {

// The key of the group's store under which a rank that fails writes why.
inline constexpr char kFailureKey[] = "failure";

struct RankOfGroup {
  std::string group;  // its name
  int rank = 0;
  int size = 1;
  ClusterKey cluster_key = {};
  bool has_certificates = false;
};

// Returns what no other group has, nor an earlier start of this one: a digest of the name and of a
// number of rank 0's. `store` is of this start of this group alone. Waits for all ranks.
//
// kFailedPrecondition, on all ranks and with the numbers of two that differ, unless all have a key
// of which each other rank knows the one that it uses, or all have none; and likewise all have
// certificates or none has. Whether they accept each other's shows when they connect.
// kDeadlineExceeded names a
// rank that did not say what it has; kUnavailable if another rank fails meanwhile, with its reason.
absl::StatusOr<Digest> AgreeOnSecurity(Store& store, const RankOfGroup& member, Deadline deadline);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_GROUP_SECURITY_H_
