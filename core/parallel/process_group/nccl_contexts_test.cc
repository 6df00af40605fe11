// Groups and lists of other GPUs than the first leave no context on the first one, which takes some
// hundred MB of it for as long as the process lasts; on the stand-ins for CUDA and NCCL.
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "core/base/fake_clock.h"
#include "core/membership/store/in_process_store.h"
#include "core/net/cluster_key.h"
#include "core/parallel/nccl/nccl_collectives.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "core/parallel/nccl/real_nccl_group.h"
#include "core/parallel/process_group/process_group.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

c10::Device Gpu(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

at::Tensor On(int index) { return at::full({1000}, 2.0f).to(Gpu(index)); }

// Its last collective goes with it, and so does that one's event.
TEST(NcclContextsTest, AGroupThatEndsOutsideOfItsDevice) {
  const std::string what = "adding";
  std::shared_ptr<ProcessGroup> group;
  {
    const c10::DeviceGuard guard(Gpu(1));
    auto made = ProcessGroup::Create({.name = "alone",
                                      .store = NewInProcessStore(),
                                      .rank = 0,
                                      .size = 1,
                                      .backend = "nccl",
                                      .cluster_key = ClusterKey()});
    ASSERT_TRUE(made.ok()) << made.status();
    group = *std::move(made);
    const at::Tensor tensor = On(1);
    const auto running = group->BeginSum(tensor, what);
    ASSERT_TRUE(running.ok()) << running.status();
    const absl::Status status = group->Wait(**running);
    ASSERT_TRUE(status.ok()) << status;
  }
  ASSERT_FALSE(fake_cuda::HasContext(0)) << "libtorch, or this test, has made one";
  // A thread that has chosen no GPU, whose current one is the first one.
  std::thread ends([&] { group.reset(); });
  ends.join();
  EXPECT_FALSE(fake_cuda::HasContext(0));
}

// The thread that asks the devices has chosen no GPU. It takes what has ended off, with its events.
TEST(NcclContextsTest, AListWithoutTheFirstGpu) {
  FakeClock clock;
  NcclPool pool(RealNcclPlatform(), &clock);
  // Nor has the thread that begins, as a program's main thread.
  std::thread begins([&] {
    const at::Tensor tensor = On(1);
    ASSERT_FALSE(fake_cuda::HasContext(0)) << "libtorch has made one";
    const auto list = pool.Get({Gpu(1), Gpu(2)}, absl::Minutes(1));
    ASSERT_TRUE(list.ok()) << list.status();
    const auto copies = NcclCollectives(*list, {}).Broadcast({tensor});
    ASSERT_TRUE(copies.ok()) << copies.status();
    EXPECT_TRUE((*copies)[1][0].cpu().equal(at::full({1000}, 2.0f))) << "it has ended";
  });
  begins.join();
  ASSERT_FALSE(fake_cuda::HasContext(0));
  std::thread asks([&] { clock.Advance(absl::Seconds(1)); });
  asks.join();
  EXPECT_EQ(clock.NextTimer(), absl::InfiniteFuture()) << "nothing runs any more";
  EXPECT_FALSE(fake_cuda::HasContext(0));
}

}  // namespace
}  // namespace distgrad
