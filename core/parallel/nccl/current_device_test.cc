// That an abort by a deadline calls no cudaSetDevice() before NCCL's, also where the group was made
// before its GPU had a context; on the stand-ins for CUDA and NCCL. Of groups,
// nccl_on_stand_ins_test shows it.
#include "core/parallel/nccl/current_device.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "core/parallel/nccl/real_nccl_group.h"
#include "tests/testing/fake_cuda/fake_cuda.h"
#include "tests/testing/fake_nccl/fake_nccl.h"

namespace distgrad {
namespace {

// How often the guard of an abort calls cudaSetDevice() on a thread for deadlines that has its
// preset.
size_t SetDevicesOfAGuard(c10::Device device) {
  const auto clock = NewSystemClock();
  EXPECT_TRUE(clock.ok()) << clock.status();
  MakeCurrentDevice(device, clock->get());
  size_t calls = 0;
  absl::Notification ended;
  (*clock)->At((*clock)->Now(), [&] {
    const size_t before = fake_cuda::SetDevices();
    const OnDevice on_device(device);
    calls = fake_cuda::SetDevices() - before;
    ended.Notify();
  });
  ended.WaitForNotification();
  return calls;
}

// Whether it has a context, as the third one has, or none, as the second one.
TEST(CurrentDeviceTest, ItIsPresetOnOtherGpusThanTheFirst) {
  std::thread([] { c10::cuda::set_device(2); }).join();
  for (const int index : {1, 2}) {
    const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    ASSERT_EQ(fake_cuda::HasContext(index), index == 2);
    EXPECT_EQ(SetDevicesOfAGuard(gpu), 0u) << gpu;
  }
}

// As the thread for deadlines of a group, which has its preset before the group connects.
TEST(CurrentDeviceTest, ItIsPresetBeforeTheGpuHasAContext) {
  const c10::Device first(c10::kCUDA, 0);
  ASSERT_GT(c10::cuda::device_count(), 0);
  ASSERT_FALSE(fake_cuda::HasContext(0));
  EXPECT_EQ(SetDevicesOfAGuard(first), 0u)
      << "this may stand still behind the kernel that is to be aborted";
}

// The GPU is not the first one, which is the current one of each new thread.
TEST(CurrentDeviceTest, ListsPresetTheirThreadForDeadlines) {
  const c10::Device second(c10::kCUDA, 1);
  bool begun = false;
  for (absl::Duration enough = absl::Milliseconds(200); !begun; enough *= 2) {
    // Who asks whether it has ended stands still with the driver, and cannot be who aborts it.
    absl::Notification over;
    NcclPlatform platform = RealNcclPlatform();
    platform.query = [&over](const c10::Event&) {
      over.WaitForNotification();
      return true;
    };
    NcclPool pool(platform);
    const std::vector<TensorVector> lists = {{at::full({1000}, 2.0f).to(second)}};
    const auto list = pool.Get({second}, absl::Minutes(1));
    ASSERT_TRUE(list.ok()) << list.status();
    const size_t before = fake_cuda::SetDevices();
    {
      const fake_cuda::Standstill standstill;
      begun = NcclCollectives(*list, {.timeout = enough}).Reduce(lists, second).ok();
      while (fake_nccl::Communicators() > 0) std::this_thread::yield();
    }
    over.Notify();
    EXPECT_EQ((*list)->status().code(), absl::StatusCode::kDeadlineExceeded) << (*list)->status();
    if (!begun) continue;
    EXPECT_LE(fake_nccl::SetDeviceBeforeTheEnd(), before)
        << "it may stand still behind the kernel that is to be aborted";
  }
}

}  // namespace
}  // namespace distgrad
