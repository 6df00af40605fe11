// Picks NCCL for GPUs that all differ, and copies between devices otherwise; for builds with CUDA.
#include "core/parallel/new_device_collectives.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/base/status.h"
#include "core/parallel/coalesced_collectives.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "core/parallel/nccl/real_nccl_group.h"

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

// Like libtorch's own state of CUDA it is never destroyed, for at the end of a process CUDA may be
// gone before it.
NcclPool& Pool() {
  static NcclPool* const pool = new NcclPool(RealNcclPlatform());
  return *pool;
}

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceCollectives>> NewDeviceCollectives(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options) {
  if (devices.empty())
    return absl::InvalidArgumentError("there are no devices to communicate between");
  if (!AreDistinctGpus(devices)) {
    return std::make_shared<CoalescedCollectives>(std::move(devices), options);
  }
  DG_ASSIGN_OR_RETURN(auto communicators, Pool().Get(devices, options.timeout));
  // Of what exit() ends in the reverse of the order in which it began: libtorch's state of CUDA is
  // there by now, and lasts until all have left.
  static const bool leaves = std::atexit([] { Pool().Leave(); }) == 0;
  if (!leaves) return absl::ResourceExhaustedError("there is no memory for a call at the exit");
  return std::make_shared<NcclCollectives>(std::move(communicators), options);
}

}  // namespace distgrad
