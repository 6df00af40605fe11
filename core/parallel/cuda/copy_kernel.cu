// Launches the kernel that copies many pieces, as many at once as a table holds.
#include <algorithm>

#include "core/parallel/cuda/copy_kernel.h"

namespace distgrad {
namespace {

constexpr uint32_t kThreads = kTileBytes / 16 / 4;
// More than run at a time, so that none stands idle when tiles differ in length.
constexpr uint32_t kBlocksPerProcessor = 16;

__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ CopyTable table) {
  for (uint32_t tile = blockIdx.x; tile < table.tiles(); tile += gridDim.x) {
    CopyTile(table, tile, threadIdx.x, kThreads);
  }
}

}  // namespace

cudaError_t HasCopyKernel(bool* has) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, CopyKernel);
  *has = error == cudaSuccess;
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) {
    return error;
  }
  cudaGetLastError();  // it is no error of what comes next
  return cudaSuccess;
}

cudaError_t LaunchCopies(const CopyJob* jobs, size_t count, cudaStream_t stream) {
  int device = 0;
  int processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error =
          cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  CopyTable table;
  for (size_t done = 0; done < count;) {
    const size_t taken = FillTable(jobs + done, count - done, &table);
    if (taken == 0) return cudaErrorInvalidValue;
    done += taken;
    if (table.count == 0) continue;
    const uint32_t blocks = std::min(table.tiles(), kBlocksPerProcessor * processors);
    CopyKernel<<<blocks, kThreads, 0, stream>>>(table);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace distgrad
