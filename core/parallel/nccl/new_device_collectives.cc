// Picks NCCL for GPUs that all differ, and copies between devices otherwise; for builds with CUDA.
#include "core/parallel/new_device_collectives.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/parallel/coalesced_collectives.h"
#include "core/parallel/nccl/nccl_collectives.h"
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

// The collectives of this process, each with its communicators. They take long to set up, are as
// much a property of the machine as its streams are, and NCCL wants few: so one for each device
// list and options, for ever. Like libtorch's own state of CUDA it is never destroyed, for at the
// end of a process CUDA may be gone before it. Thread-safe.
class KnownCollectives {
 public:
  absl::StatusOr<std::shared_ptr<DeviceCollectives>> Get(std::vector<c10::Device> devices,
                                                         DeviceCollectivesOptions options) {
    std::string key =
        absl::StrCat(options.bucket_bytes, " ", absl::FormatDuration(options.timeout));
    for (const c10::Device device : devices) absl::StrAppend(&key, " ", device.str());
    absl::MutexLock lock(&mu_);
    std::shared_ptr<NcclCollectives>& collectives = by_key_[key];
    if (collectives == nullptr || !collectives->status().ok()) {
      collectives = nullptr;
      DG_ASSIGN_OR_RETURN(collectives,
                          NcclCollectives::Create(std::move(devices), options,
                                                  [](const std::vector<c10::Device>& list) {
                                                    return StartNcclGroup(list);
                                                  }));
    }
    return collectives;
  }

 private:
  absl::Mutex mu_;  // also while one is set up: NCCL takes no two at a time on the same devices
  std::map<std::string, std::shared_ptr<NcclCollectives>> by_key_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceCollectives>> NewDeviceCollectives(
    std::vector<c10::Device> devices, DeviceCollectivesOptions options) {
  if (devices.empty())
    return absl::InvalidArgumentError("there are no devices to communicate between");
  static KnownCollectives* const collectives = new KnownCollectives;
  if (AreDistinctGpus(devices)) return collectives->Get(std::move(devices), options);
  return std::make_shared<CoalescedCollectives>(std::move(devices), options);
}

}  // namespace distgrad
