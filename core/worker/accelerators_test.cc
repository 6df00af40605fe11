// That a program with a worker has libtorch's CUDA, if it was built with it; and a backward through
// a GPU, where there is one.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/worker/context.h"
#include "core/worker/worker.h"
#include "gtest/gtest.h"
#include "tests/testing/cluster.h"

namespace distgrad {
namespace {

TEST(AcceleratorsTest, CudaIsLoadedWithTheWorker) {
  EXPECT_TRUE(c10::impl::hasDeviceGuardImpl(at::kCUDA));
  EXPECT_TRUE(Worker::Create({.name = "alone"}).ok());
}

TEST(AcceleratorsTest, ABackwardCrossesToTheGpuAndBack) {
  if (c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() == 0) {
    GTEST_SKIP() << "this machine has no GPU";
  }
  auto worker = Worker::Create({.name = "alone"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  const Context context = (*worker)->NewContext();
  const at::Tensor on_host = at::rand({4}).requires_grad_();
  const at::Tensor on_gpu = at::rand({4}, at::kCUDA).requires_grad_();
  const at::Tensor loss = (on_host.to(at::kCUDA) * on_gpu).cpu().sum();
  ASSERT_TRUE(context.Backward({loss}).ok());
  EXPECT_TRUE(context.Gradient(on_host)->equal(on_gpu.cpu()));
  EXPECT_TRUE(context.Gradient(on_gpu)->cpu().equal(on_host));
}

TEST(AcceleratorsTest, TensorsGoFromGpuToGpu) {
  if (c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount() == 0) {
    GTEST_SKIP() << "this machine has no GPU";
  }
  const at::Device gpu(at::kCUDA, 0);
  Cluster cluster(
      {.workers = 2, .transport = "socket", .device_maps = {{"worker1", {{gpu, gpu}}}}});
  // Without a channel they would arrive, too, by way of the CPU.
  for (const char* const key : {"worker/0", "worker/1"}) {
    const auto entry = cluster[0].store()->Get(key, Deadline::After(absl::Seconds(10)));
    ASSERT_TRUE(entry.ok()) << entry.status();
    EXPECT_TRUE(absl::StrContains(*entry, "#gpus=")) << *entry;
  }
  ASSERT_TRUE(cluster[1]
                  .Register("double",
                            [](Request& r) -> absl::StatusOr<Message> {
                              return Message{"", {r.message.tensors[0] * 2}};
                            })
                  .ok());
  for (const int64_t size : {1, 5000, 100000, 1000000, 30000000}) {
    const at::Tensor x = at::rand({size}, gpu).requires_grad_();
    const Context context = cluster[0].NewContext();
    auto reply = cluster[0].Call("worker1", "double", {"", {x}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->tensors[0].detach().cpu().equal(x.detach().cpu() * 2));
    ASSERT_TRUE(context.Backward({(reply->tensors[0] * 3).sum()}).ok());
    EXPECT_TRUE(context.Gradient(x)->cpu().equal(at::full({size}, 6.0f)));
  }
}

}  // namespace
}  // namespace distgrad
