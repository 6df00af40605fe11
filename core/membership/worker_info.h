// The entry of a member that the others know, and how it stands in the store.
#ifndef DISTGRAD_CORE_MEMBERSHIP_WORKER_INFO_H_
#define DISTGRAD_CORE_MEMBERSHIP_WORKER_INFO_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/ids.h"

namespace distgrad {

inline constexpr size_t kMaxWorkerText = 1024;      // bytes, of a name or an address
inline constexpr size_t kMaxWorkerDevices = 60000;  // bytes

struct WorkerInfo {
  WorkerRank rank = 0;
  std::string name = {};     // unique in the job
  std::string address = {};  // what its transport listens on
  Incarnation incarnation = 0;
  std::string devices = {};  // what core/worker/device_maps.h says of them
  bool left = false;         // in good order; it may come back
  int64_t barriers = 0;      // of the job, begun before it came: it takes no part in them
};

std::string EncodeWorkerInfo(const WorkerInfo& worker);

// Reads an entry; kInvalidArgument for what is not one of the worker of that rank.
absl::StatusOr<WorkerInfo> DecodeWorkerInfo(absl::string_view entry, WorkerRank rank);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_WORKER_INFO_H_
