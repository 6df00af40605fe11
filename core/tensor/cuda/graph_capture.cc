// Takes this thread out of CUDA's captures for a while; for builds with CUDA.
#include "core/tensor/graph_capture.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

namespace distgrad {

void OutsideOfCaptures(absl::FunctionRef<void()> run) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  run();
}

}  // namespace distgrad
