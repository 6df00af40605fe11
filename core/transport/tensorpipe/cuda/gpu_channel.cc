// Makes TensorPipe's channel for GPUs, where there is one; for builds with CUDA.
#include "core/transport/tensorpipe/gpu_channel.h"

#include "tensorpipe/tensorpipe_cuda.h"

namespace distgrad {

std::shared_ptr<tensorpipe::channel::Context> NewGpuChannel() {
  auto channel = tensorpipe::channel::cuda_basic::create(tensorpipe::channel::basic::create());
  // One of the devices is the CPU.
  return channel->isViable() && channel->deviceDescriptors().size() > 1 ? channel : nullptr;
}

tensorpipe::Buffer GpuBuffer(const Segment& segment) {
  return tensorpipe::CudaBuffer{segment.data, static_cast<cudaStream_t>(segment.stream)};
}

}  // namespace distgrad
