// Copies from the host to several GPUs, on the stand-in for CUDA, whose streams can stand still.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/parallel/scatter_gather.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

TEST(ScatterToGpusTest, WhatIsPinnedIsLeftToStreams) {
  const at::Tensor batch = at::arange(3000).pin_memory();
  std::vector<at::Tensor> parts;
  absl::Notification returned;
  std::thread scatter;
  {
    const fake_cuda::Standstill standstill;
    scatter = std::thread([&] {
      parts = Scatter(batch, {Gpu(0), Gpu(1), Gpu(2)});
      returned.Notify();
    });
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(absl::Seconds(60)))
        << "it waits for a device";
  }
  scatter.join();
  ASSERT_EQ(parts.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(parts[i].device(), Gpu(i));
    EXPECT_TRUE(parts[i].cpu().equal(batch.narrow(0, 1000 * i, 1000))) << i;
  }
}

// Its memory may be written to at once.
TEST(ScatterToGpusTest, WhatIsNotPinnedIsReadAtOnce) {
  const at::Tensor batch = at::arange(3000);
  const std::vector<at::Tensor> parts = Scatter(batch, {Gpu(0), Gpu(1), Gpu(2)});
  batch.zero_();
  EXPECT_TRUE(parts[2].cpu().equal(at::arange(2000, 3000)));
}

}  // namespace
}  // namespace distgrad
