// The choice of an implementation of DeviceCollectives.
#ifndef DISTGRAD_CORE_PARALLEL_NEW_DEVICE_COLLECTIVES_H_
#define DISTGRAD_CORE_PARALLEL_NEW_DEVICE_COLLECTIVES_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/parallel/device_collectives.h"

namespace distgrad {

// NCCL where all devices are distinct CUDA devices, coalesced adds elsewhere. kInvalidArgument
// without devices.
absl::StatusOr<std::shared_ptr<DeviceCollectives>> NewDeviceCollectives(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options = {});

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NEW_DEVICE_COLLECTIVES_H_
