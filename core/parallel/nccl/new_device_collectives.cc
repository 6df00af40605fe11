// Picks NCCL for GPUs that all differ, and copies between devices otherwise; for builds with CUDA.
#include "core/parallel/new_device_collectives.h"

#include <algorithm>
#include <utility>

#include "core/base/status.h"
#include "core/parallel/coalesced_collectives.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/process_communicators.h"

namespace distgrad {
namespace {

bool AreDistinctGpus(std::vector<c10::Device> devices) {
  const auto by_index = [](c10::Device a, c10::Device b) { return a.index() < b.index(); };
  std::sort(devices.begin(), devices.end(), by_index);
  return devices.size() > 1 &&
         std::all_of(devices.begin(), devices.end(),
                     [](c10::Device device) { return device.is_cuda() && device.has_index(); }) &&
         std::adjacent_find(devices.begin(), devices.end()) == devices.end();
}

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceCollectives>> NewDeviceCollectives(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options) {
  if (devices.empty())
    return absl::InvalidArgumentError("there are no devices to communicate between");
  if (!AreDistinctGpus(devices)) {
    return std::make_shared<CoalescedCollectives>(std::move(devices), options);
  }
  DG_ASSIGN_OR_RETURN(auto communicators, ProcessCommunicators(devices, options.timeout));
  return std::make_shared<NcclCollectives>(std::move(communicators), options);
}

}  // namespace distgrad
