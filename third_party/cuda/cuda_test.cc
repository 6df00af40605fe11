// What distgrad relies on in the wheels: that libtorch's CUDA libraries, NVIDIA's and NCCL load as
// we link them, also those that they load by name, and that all of it does no harm on a machine
// without a GPU.
#include <ATen/DynamicLibrary.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <string>

#include "gtest/gtest.h"
#include "nccl.h"

namespace {

// Referring to it keeps the library that it is in among those that are loaded.
int Devices() { return static_cast<int>(c10::cuda::device_count()); }

TEST(CudaTest, VersionsAreThePinnedOnes) {
  int runtime = 0;
  ASSERT_EQ(cudaRuntimeGetVersion(&runtime), cudaSuccess);
  EXPECT_EQ(runtime / 1000, 13);
  int nccl = 0;
  ASSERT_EQ(ncclGetVersion(&nccl), ncclSuccess);
  EXPECT_GE(nccl, NCCL_VERSION_CODE);
}

TEST(CudaTest, LibrariesThatAreLoadedByNameAreFound) {
  const bool driver = Devices() > 0;
  EXPECT_NO_THROW(at::DynamicLibrary("libtorch_cuda_linalg.so", nullptr, /*leak_handle=*/true));
  try {
    at::DynamicLibrary("libcaffe2_nvrtc.so", nullptr, /*leak_handle=*/true);
  } catch (const std::exception& e) {
    // It is there, and so is all that it needs, but for the driver.
    EXPECT_FALSE(driver) << e.what();
    EXPECT_NE(std::string(e.what()).find("dlopen: libcuda.so.1"), std::string::npos) << e.what();
  }
}

TEST(CudaTest, WithoutAGpuTheCpuWorksAndCudaSaysSo) {
  if (Devices() > 0) GTEST_SKIP() << "this machine has a GPU";
  const at::Tensor x = at::ones({4}).requires_grad_();
  (x * x).sum().backward();
  EXPECT_EQ(x.grad().sum().item<float>(), 8);
  EXPECT_THROW(at::ones({4}, at::kCUDA), std::exception);
}

TEST(CudaTest, OnAGpuATensorIsAdded) {
  if (Devices() == 0) GTEST_SKIP() << "this machine has no GPU";
  EXPECT_EQ(at::ones({1000}, at::kCUDA).sum().item<float>(), 1000);
}

}  // namespace
