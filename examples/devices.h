// The device that a process of an example computes on: --device.
#ifndef DISTGRAD_EXAMPLES_DEVICES_H_
#define DISTGRAD_EXAMPLES_DEVICES_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "core/tensor/device_map.h"
#include "examples/launcher.h"

namespace distgrad {

// kFailedPrecondition if there is no such device here: "cpu", or "cuda", for which the program was
// built with --config=cuda, and the machine has a GPU.
absl::Status CheckDevice(const std::string& name);

// The device of the process at `place`: with "cuda" a GPU of its machine, whose processes take them
// in turns, by their rank. All machines have as many processes and GPUs, and a block of the ranks.
absl::StatusOr<c10::Device> DeviceOf(const std::string& name, const JobPlace& place);

// WorkerOptions::device_maps of that process: where tensors on its device arrive in each other one,
// "worker<rank>".
absl::StatusOr<std::map<std::string, DevicePairs>> DeviceMapsOf(const std::string& name,
                                                                const JobPlace& place);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_DEVICES_H_
