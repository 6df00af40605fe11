// That an abort by a deadline calls no cudaSetDevice() before NCCL's, also where the group was made
// before its GPU had a context; on the stand-in for CUDA.
#include "core/parallel/nccl/current_device.h"

#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "core/base/clock.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

// As the thread for deadlines of a group, which has its preset before the group connects.
TEST(CurrentDeviceTest, ItIsPresetBeforeTheGpuHasAContext) {
  const c10::Device first(c10::kCUDA, 0);
  ASSERT_GT(c10::cuda::device_count(), 0);
  ASSERT_FALSE(fake_cuda::HasContext(0));
  const auto clock = NewSystemClock();
  ASSERT_TRUE(clock.ok()) << clock.status();
  MakeCurrentDevice(first, clock->get());
  size_t calls = 0;
  absl::Notification ended;
  (*clock)->At((*clock)->Now(), [&] {
    const size_t before = fake_cuda::SetDevices();
    const OnDevice on_device(first);
    calls = fake_cuda::SetDevices() - before;
    ended.Notify();
  });
  ended.WaitForNotification();
  EXPECT_EQ(calls, 0u) << "this may stand still behind the kernel that is to be aborted";
}

}  // namespace
}  // namespace distgrad
