// Lists of devices.
#ifndef DISTGRAD_CORE_PARALLEL_DEVICES_H_
#define DISTGRAD_CORE_PARALLEL_DEVICES_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace distgrad {

// "cuda" means the current CUDA device and "cpu:0" is "cpu", as tensors have it.
c10::Device Canonical(c10::Device device);

// The devices as given, or all CUDA devices if none were. Throws c10::ValueError if there is no
// CUDA device either, and for a device that this process does not have.
std::vector<c10::Device> DevicesOrAllCuda(std::vector<c10::Device> devices);

// The calling thread's current streams of those devices that have streams, each once.
std::vector<c10::Stream> CurrentStreams(const std::vector<c10::Device>& devices);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_DEVICES_H_
