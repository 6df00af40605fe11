// Many copies within one GPU's memory in one launch.
#ifndef DISTGRAD_CORE_PARALLEL_CUDA_COPY_KERNEL_H_
#define DISTGRAD_CORE_PARALLEL_CUDA_COPY_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/parallel/cuda/copy_plan.h"

namespace distgrad {

// Whether this program has the kernel for the current device. The others are older than those that
// it was compiled for (third_party/cuda/cuda.bzl).
cudaError_t HasCopyKernel(bool* has);

// Launches the copies on `stream`, which belongs to the current device, as does the memory: one
// launch for each kJobsPerLaunch of them. `jobs` may be freed at once. Returns the first error;
// nothing is launched after it.
cudaError_t LaunchCopies(const CopyJob* jobs, size_t count, cudaStream_t stream);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_CUDA_COPY_KERNEL_H_
