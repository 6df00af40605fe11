// The functions that libtorch and TensorPipe look up in the driver, libcuda.so.1.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "tests/testing/fake_cuda/fake_cuda.h"
#include "tests/testing/fake_cuda/machine.h"

namespace {

using distgrad::fake_cuda::kDevices;
using distgrad::fake_cuda::Machine;

[[noreturn]] void EndFor(const char* function) {
  std::fprintf(stderr, "fake CUDA: there is no %s\n", function);
  std::abort();
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = kDevices;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = distgrad::fake_cuda::HasContext(device) ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "an error of the fake CUDA";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return cuGetErrorName({}, text); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr data) {
  const int device = Machine::Get().Find(reinterpret_cast<void*>(data)).device;
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) EndFor("other attribute of a pointer");
  *static_cast<int*>(value) = device;
  return CUDA_SUCCESS;
}

// Looked up and kept by libtorch, in case that it needs them.
int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                     unsigned long long, int* status) {  // NOLINT: CUDA's type
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(+[] { EndFor("driver function"); });
  if (status != nullptr) *status = 0;
  return 0;
}

}  // extern "C"
