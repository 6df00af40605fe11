// Asks libtorch for its GPUs, which only a build with CUDA knows.
#include "examples/devices.h"

#include "absl/strings/str_cat.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

absl::StatusOr<int> CountGpus() {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) {
    return absl::FailedPreconditionError(
        "--device cuda: this program was built without CUDA; build it with --config=cuda");
  }
  const int gpus = c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
  if (gpus > 0) return gpus;
  return absl::FailedPreconditionError("--device cuda: CUDA finds no GPU on this machine");
}

c10::Device GpuOf(int rank, const JobPlace& place, int gpus) {
  const int on_machine = place.local_world_size > 0 ? place.local_world_size : place.world_size;
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(rank % on_machine % gpus)};
}

}  // namespace

absl::Status CheckDevice(const std::string& name) {
  return name == "cuda" ? CountGpus().status() : absl::OkStatus();
}

absl::StatusOr<c10::Device> DeviceOf(const std::string& name, const JobPlace& place) {
  if (name != "cuda") return c10::Device(c10::kCPU);
  DG_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  return GpuOf(place.rank, place, gpus);
}

absl::StatusOr<std::map<std::string, DevicePairs>> DeviceMapsOf(const std::string& name,
                                                                const JobPlace& place) {
  std::map<std::string, DevicePairs> maps;
  if (name != "cuda") return maps;
  DG_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  for (int rank = 0; rank < place.world_size; ++rank) {
    if (rank == place.rank) continue;
    maps[absl::StrCat("worker", rank)] = {
        {GpuOf(place.rank, place, gpus), GpuOf(rank, place, gpus)}};
  }
  return maps;
}

}  // namespace distgrad
