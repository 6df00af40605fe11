// The streams of GPUs on which a message's copies were begun.
#ifndef DISTGRAD_CORE_TENSOR_GPU_STREAMS_H_
#define DISTGRAD_CORE_TENSOR_GPU_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace distgrad {

// A stream is waited for once, and not for each tensor. For one thread.
class GpuStreams {
 public:
  // The current stream of this device of CUDA's is one of them.
  void Add(c10::Device device) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }
  void Await() const {
    for (const c10::Stream& stream : streams_) stream.synchronize();
  }

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_GPU_STREAMS_H_
