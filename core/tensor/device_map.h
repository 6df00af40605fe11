// Which device of this worker goes with which device of another: a tensor that is on the one here
// arrives on the other there, and its gradient comes back the same way.
#ifndef DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_
#define DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_

#include <c10/core/Device.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

// Ours and theirs. The CPU is not among them: it always goes with the CPU.
using DevicePairs = std::vector<std::pair<c10::Device, c10::Device>>;

// Immutable once it is shared.
class DeviceMap {
 public:
  // The CPU alone.
  DeviceMap() = default;
  // Every device with the one of the same name: for a worker with itself.
  static DeviceMap Identity();
  // kInvalidArgument unless it is one to one, each device has its number, and none is the CPU.
  static absl::StatusOr<DeviceMap> Of(DevicePairs pairs);

  // Theirs for one of ours; kFailedPrecondition, which names it, if there is none.
  absl::StatusOr<c10::Device> Remote(c10::Device local) const;

  // This, and what the other end has for us, as it has it. kInvalidArgument where the two do not
  // agree.
  absl::StatusOr<DeviceMap> With(const DeviceMap& theirs) const;

  const DevicePairs& pairs() const { return pairs_; }

  // Whether memory of GPUs goes to GPUs as it is. If not, by way of the CPU, like all others.
  bool carries_gpus() const { return carries_gpus_; }
  void set_carries_gpus(bool carries) { carries_gpus_ = carries; }

 private:
  bool identity_ = false;
  bool carries_gpus_ = false;
  DevicePairs pairs_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_DEVICE_MAP_H_
