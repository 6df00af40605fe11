// Makes collectives that copy between devices; for builds without CUDA.
#include "core/parallel/new_device_collectives.h"

#include <utility>

#include "core/parallel/coalesced_collectives.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<DeviceCollectives>> NewDeviceCollectives(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options) {
  if (devices.empty())
    return absl::InvalidArgumentError("there are no devices to communicate between");
  return std::make_shared<CoalescedCollectives>(std::move(devices), options);
}

}  // namespace distgrad
