// Makes no channel for GPUs; for builds without CUDA.
#include "core/transport/tensorpipe/gpu_channel.h"

#include "core/base/check.h"

namespace distgrad {

std::shared_ptr<tensorpipe::channel::Context> NewGpuChannel() { return nullptr; }

tensorpipe::Buffer GpuBuffer(const Segment& segment) {
  DG_CHECK(false) << "memory of a GPU in a build without CUDA";
  return {};
}

}  // namespace distgrad
