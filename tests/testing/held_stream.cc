// Holds a stream by a callback that does not return.
#include "tests/testing/held_stream.h"

#include <cuda_runtime_api.h>

#include "core/base/check.h"

namespace distgrad {

HeldStream::HeldStream(c10::cuda::CUDAStream stream) : stream_(stream) {
  const auto wait = [](cudaStream_t, cudaError_t, void* released) {
    static_cast<absl::Notification*>(released)->WaitForNotification();
  };
  const cudaError_t error = cudaStreamAddCallback(stream_.stream(), wait, &released_, 0);
  DG_CHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

HeldStream::~HeldStream() {
  Release();
  stream_.synchronize();
}

void HeldStream::Release() {
  if (!released_.HasBeenNotified()) released_.Notify();
}

}  // namespace distgrad
