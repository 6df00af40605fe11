// Workers whose tensors are on GPUs, by TensorPipe's channel for them, on the stand-in for CUDA:
// calls, replies and gradients, and none of them by way of the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "core/worker/context.h"
#include "core/worker/worker.h"
#include "tests/testing/cluster.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

constexpr int64_t kBytes = 400 * 500 * sizeof(float);

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// Worker 0's GPUs are worker 1's, the other way round.
at::Device There(int here) { return Gpu(fake_cuda::kDevices - 1 - here); }

ClusterOptions Crossed(bool gpu_channel) {
  DevicePairs pairs;
  for (int i = 0; i < fake_cuda::kDevices; ++i) pairs.emplace_back(Gpu(i), There(i));
  return {.workers = 2,
          .transport = "socket",
          .device_maps = {{"worker1", pairs}},
          .gpu_channel = gpu_channel};
}

void RegisterEcho(Worker& worker) {
  ASSERT_TRUE(
      worker
          .Register("echo",
                    [](Request& r) -> absl::StatusOr<Message> {
                      return Message{r.message.tensors[0].device().str(), r.message.tensors};
                    })
          .ok());
}

// What went by way of the CPU meanwhile.
class Staged {
 public:
  size_t bytes() const { return fake_cuda::PageableBytes() - before_; }

 private:
  const size_t before_ = fake_cuda::PageableBytes();
};

TEST(GpuChannelTest, CallsRepliesAndGradientsStayOnGpus) {
  Cluster cluster(Crossed(/*gpu_channel=*/true));
  RegisterEcho(cluster[1]);
  for (int i = 0; i < fake_cuda::kDevices; ++i) {
    const at::Tensor on_host = at::rand({400, 500});
    const at::Tensor x = on_host.to(Gpu(i)).requires_grad_();
    Context context = cluster[0].NewContext();
    const Staged by_call;
    auto reply = cluster[0].Call("worker1", "echo", {"", {x}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(by_call.bytes(), 0u);
    EXPECT_EQ(reply->payload, There(i).str());
    EXPECT_EQ(reply->tensors[0].device(), Gpu(i));
    EXPECT_TRUE(reply->tensors[0].detach().cpu().equal(on_host));

    const at::Tensor root = (reply->tensors[0].cpu() * 3).sum();
    const Staged by_backward;
    const absl::Status done = context.Backward({root});
    ASSERT_TRUE(done.ok()) << done;
    EXPECT_LT(by_backward.bytes(), 2 * kBytes) << "only the root's own copy to the GPU";
    const absl::StatusOr<at::Tensor> gradient = context.Gradient(x);
    ASSERT_TRUE(gradient.ok()) << gradient.status();
    EXPECT_EQ(gradient->device(), Gpu(i));
    EXPECT_TRUE(gradient->cpu().equal(at::full({400, 500}, 3.0f)));
  }
}

// What a test on a machine with GPUs goes by.
TEST(GpuChannelTest, AWorkersEntryInTheStoreSaysWhetherItHasTheChannel) {
  for (const bool gpu_channel : {true, false}) {
    Cluster cluster(Crossed(gpu_channel));
    const auto entry = cluster[0].store()->Get("worker/0", Deadline::After(absl::Seconds(10)));
    ASSERT_TRUE(entry.ok()) << entry.status();
    EXPECT_EQ(absl::StrContains(*entry, "#gpus=3"), gpu_channel) << *entry;
    EXPECT_EQ(absl::StrContains(*entry, "#gpus="), gpu_channel) << *entry;
  }
}

TEST(GpuChannelTest, TheOtherWayRoundAndSeveralAtOnce) {
  Cluster cluster(Crossed(/*gpu_channel=*/true));
  RegisterEcho(cluster[0]);
  std::vector<at::Tensor> on_host;
  std::vector<Future<Message>> replies;
  for (int i = 0; i < 12; ++i) {
    on_host.push_back(at::rand({i % 3 == 0 ? 2000 : i % 3 == 1 ? 100000 : 600000}));
    replies.push_back(cluster[1].CallAsync(
        "worker0", "echo", {"", {on_host.back().to(Gpu(i % fake_cuda::kDevices))}}));
  }
  for (int i = 0; i < 12; ++i) {
    const absl::StatusOr<Message>& reply = replies[i].Wait();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->payload, There(i % fake_cuda::kDevices).str());
    EXPECT_TRUE(reply->tensors[0].cpu().equal(on_host[i])) << i;
  }
}

// Both on streams of their own; the caller's stands still while it calls.
TEST(GpuChannelTest, StreamsOfTheCallerAndOfTheHandler) {
  Cluster cluster(Crossed(/*gpu_channel=*/true));
  const c10::impl::VirtualGuardImpl impl(at::kCUDA);
  const at::Tensor on_host = at::rand({500000}).pin_memory();
  at::Tensor read;
  ASSERT_TRUE(cluster[1]
                  .Register("read",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              const c10::StreamGuard guard(
                                  impl.getNewStream(r.message.tensors[0].device()));
                              read = r.message.tensors[0].cpu();
                              return Message();
                            })
                  .ok());
  const c10::Stream stream = impl.getNewStream(Gpu(0));
  Future<Message> reply;
  {
    const fake_cuda::Standstill standstill(stream.native_handle());
    const c10::StreamGuard guard(stream);
    at::Tensor there = at::empty({500000}, Gpu(0));
    there.copy_(on_host, /*non_blocking=*/true);
    reply = cluster[0].CallAsync("worker1", "read", {"", {there}});
  }
  ASSERT_TRUE(reply.Wait().ok()) << reply.Wait().status();
  EXPECT_TRUE(read.equal(on_host));
}

TEST(GpuChannelTest, WhoDoesWithoutGoesByWayOfTheCpu) {
  Cluster cluster(Crossed(/*gpu_channel=*/false));
  RegisterEcho(cluster[0]);
  RegisterEcho(cluster[1]);
  for (const int caller : {0, 1}) {
    const at::Tensor on_host = at::rand({400, 500});
    const at::Tensor x = on_host.to(Gpu(0));
    const Staged staged;
    auto reply = cluster[caller].Call(1 - caller, "echo", {"", {x}});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(staged.bytes(), 4 * kBytes);
    EXPECT_EQ(reply->payload, There(0).str());
    EXPECT_TRUE(reply->tensors[0].cpu().equal(on_host));
  }
}

TEST(GpuChannelTest, NoMemoryOverThereEndsTheCallWithAnError) {
  Cluster cluster(Crossed(/*gpu_channel=*/true));
  RegisterEcho(cluster[1]);
  const at::TensorOptions bytes(at::kByte);
  const at::Tensor all =
      at::empty({int64_t{fake_cuda::kDeviceBytes} - (40 << 20)}, bytes.device(There(0)));
  const at::Tensor x = at::empty({50 << 20}, bytes.device(Gpu(0)));
  const absl::Status status = cluster[0].Call("worker1", "echo", {"", {x}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

}  // namespace
}  // namespace distgrad
