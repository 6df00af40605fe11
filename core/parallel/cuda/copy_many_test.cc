// The kernel, where there is a GPU; and that its absence is an error and no crash.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAFunctions.h>

#include <vector>

#include "core/parallel/bucket.h"
#include "core/parallel/cuda/copy_kernel.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

bool NoGpu() { return c10::cuda::device_count() == 0; }

TEST(CopyManyTest, WithoutAGpuALaunchIsAnError) {
  if (!NoGpu()) GTEST_SKIP() << "this machine has a GPU";
  char from[8], to[8];
  const CopyJob job{to, from, sizeof(from)};
  EXPECT_NE(LaunchCopies(&job, 1, nullptr), cudaSuccess);
}

TEST(CopyManyTest, TensorsOfTheHostAreCopiedAsEver) {
  const at::Tensor from = at::randint(100, {3, 5});
  const at::Tensor to = at::zeros({5, 3}).t();
  CopyMany({to}, {from});
  EXPECT_TRUE(at::equal(to, from));
}

TEST(CopyManyTest, AnyDtypeCountAndLayoutThereAndBack) {
  if (NoGpu()) GTEST_SKIP() << "this machine has no GPU";
  std::vector<at::Tensor> tensors;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kLong,
                           at::kBool, at::kComplexFloat}) {
    for (const int64_t size : {0, 1, 3, 1000, 5000, 100'001}) {
      const at::Tensor whole = at::randint(2, {size + 1}, at::kCUDA).to(dtype);
      tensors.push_back(whole.slice(0, 1));  // not aligned
      tensors.push_back(at::randint(2, {7, size}, at::kCUDA).to(dtype).t());
      tensors.push_back(at::randint(2, {7, 2 * size}, at::kCUDA).to(dtype).slice(1, 0, size));
    }
  }
  for (int i = 0; i < 3000; ++i) tensors.push_back(at::randint(9, {i % 50}, at::kCUDA));
  std::vector<at::Tensor> back;
  for (const at::Tensor& tensor : tensors) back.push_back(at::zeros_like(tensor));
  for (const Bucket& bucket : AssignBuckets(tensors, 1 << 20)) {
    Unpack(bucket, Pack(bucket, tensors), back);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    ASSERT_TRUE(at::equal(back[i].cpu(), tensors[i].cpu())) << i << " " << tensors[i].sizes();
  }
}

TEST(CopyManyTest, CountsAsAWrite) {
  if (NoGpu()) GTEST_SKIP() << "this machine has no GPU";
  const at::Tensor from = at::randint(9, {10}, at::kCUDA);
  const at::Tensor to = at::empty_like(from);
  const auto before = to._version();
  CopyMany({to}, {from});
  EXPECT_GT(to._version(), before);
}

}  // namespace
}  // namespace distgrad
