// Completes and checks lists of devices, and finds their current streams.
#include "core/parallel/devices.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace distgrad {

c10::Device Canonical(c10::Device device) {
  if (device.is_cpu()) return c10::kCPU;
  TORCH_CHECK_VALUE(c10::impl::hasDeviceGuardImpl(device.type()),
                    "data parallel: this build of libtorch knows no device ", device);
  const c10::impl::VirtualGuardImpl impl(device.type());
  if (!device.has_index()) device = impl.getDevice();
  TORCH_CHECK_VALUE(device.index() < impl.deviceCount(), "data parallel: there is no device ",
                    device, ", only ", static_cast<int>(impl.deviceCount()), " of its type");
  return device;
}

std::vector<c10::Device> DevicesOrAllCuda(std::vector<c10::Device> devices) {
  if (devices.empty() && c10::impl::hasDeviceGuardImpl(c10::kCUDA)) {
    const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i) devices.emplace_back(c10::kCUDA, i);
  }
  TORCH_CHECK_VALUE(!devices.empty(),
                    "data parallel: no devices were given, and there is no CUDA device to take "
                    "instead; give a list, such as {cpu, cpu}");
  for (c10::Device& device : devices) device = Canonical(device);
  return devices;
}

std::vector<c10::Stream> CurrentStreams(const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> streams;
  for (const c10::Device device : devices) {
    if (device.is_cpu() || !at::accelerator::isAccelerator(device.type())) continue;
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }
  return streams;
}

}  // namespace distgrad
