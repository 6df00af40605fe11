// The device maps of a worker with its peers, checked against the devices that each side has.
#ifndef DISTGRAD_CORE_WORKER_DEVICE_MAPS_H_
#define DISTGRAD_CORE_WORKER_DEVICE_MAPS_H_

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/ids.h"
#include "core/membership/worker_info.h"
#include "core/tensor/device_map.h"
#include "core/transport/transport.h"

namespace distgrad {

// Thread-safe.
class DeviceMaps {
 public:
  // The maps that the options ask for, by the peers' names.
  using Wanted = std::map<std::string, DevicePairs>;

  // Writes what other workers have to know (WorkerInfo::devices): the devices of this process, and
  // its maps. kInvalidArgument for maps that are none.
  static absl::StatusOr<std::string> Encode(const Wanted& wanted);

  // `transport` says which peers memory of GPUs goes to as it is; With() may be called while it
  // lives.
  DeviceMaps(std::string self, Wanted wanted, const Transport* transport)
      : self_(std::move(self)), wanted_(std::move(wanted)), transport_(transport) {}

  // Returns the map with a worker, from both its maps and ours. kInvalidArgument if the two
  // contradict each other, or name a device that is not there; its message names the worker.
  absl::StatusOr<std::shared_ptr<const DeviceMap>> With(const WorkerInfo& peer);

 private:
  struct Known {
    Incarnation incarnation;
    absl::StatusOr<std::shared_ptr<const DeviceMap>> map;
  };

  absl::StatusOr<std::shared_ptr<const DeviceMap>> Make(const WorkerInfo& peer) const;

  // Constant after construction.
  const std::string self_;
  const Wanted wanted_;
  const Transport* const transport_;

  absl::Mutex mu_;
  std::map<WorkerRank, Known> known_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_DEVICE_MAPS_H_
