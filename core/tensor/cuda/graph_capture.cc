// Takes this thread out of CUDA's captures for a while, and knows which streams are captured; for
// builds with CUDA.
#include "core/tensor/graph_capture.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

namespace distgrad {

void OutsideOfCaptures(c10::Device device, absl::FunctionRef<void()> run) {
  const c10::DeviceGuard on_device(device);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  run();
}

bool IsCaptured(c10::Stream stream) {
  const c10::DeviceGuard of_stream(stream.device());  // CUDA has one name for all default streams
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The default stream, while one that waits for it is captured.
    cudaGetLastError();
    return true;
  }
  C10_CUDA_CHECK(error);
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace distgrad
