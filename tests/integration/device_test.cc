// Backward through workers whose graphs lie on accelerators, simulated ones: roots, leaves and
// tensors that cross are on devices, and the path changes between them and the CPU. Gradients are
// the CPU's, up to the order of additions, and no stream may be left unordered.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "tests/testing/cluster.h"
#include "tests/testing/fake_device/fake_device.h"

namespace distgrad {
namespace {

using fake_device::Device;

at::Tensor Leaf(int seed, at::Device device = at::kCPU) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn({3, 3}, generator).to(device).set_requires_grad(true);
}

// What both ways compute: device 0, the CPU, device 1, the CPU, with a parameter on a device and
// one on the CPU.
at::Tensor Compute(at::Tensor x, const at::Tensor& on_device, const at::Tensor& on_cpu,
                   at::Device first, at::Device second) {
  x = x.to(first).mul(on_device.to(first)).sin();
  x = x.to(at::kCPU).add(on_cpu);
  x = x.to(second).exp();
  return x.to(at::kCPU).mul(on_cpu);
}

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(cluster_[1]
                    .Register("compute",
                              [this](Request& r) -> absl::StatusOr<Message> {
                                const at::Tensor out = Compute(r.message.tensors[0], on_device_,
                                                               on_cpu_, Device(0), Device(1));
                                return Message{"", {out, out.to(Device(2)).cos()}};
                              })
                    .ok());
    ASSERT_TRUE(cluster_[1]
                    .Register("gradients",
                              [this](Request& r) -> absl::StatusOr<Message> {
                                auto a = r.context.Gradient(on_device_);
                                auto b = r.context.Gradient(on_cpu_);
                                if (!a.ok()) return a.status();
                                if (!b.ok()) return b.status();
                                EXPECT_EQ(a->device(), Device(0));
                                return Message{"", {a->to(at::kCPU), *b}};
                              })
                    .ok());
  }
  void TearDown() override { EXPECT_TRUE(fake_device::TakeViolations().empty()); }

  at::Tensor on_device_ = Leaf(1, Device(0)), on_cpu_ = Leaf(2);
  Cluster cluster_{ClusterOptions{.workers = 2}};
};

TEST_F(DeviceTest, EqualsTheCpu) {
  for (int round = 0; round < 20; ++round) {
    // The same on the CPU.
    at::Tensor x = Leaf(10 + round), a = on_device_.detach().to(at::kCPU).requires_grad_(),
               b = on_cpu_.detach().clone().requires_grad_();
    const at::Tensor out = Compute(x, a, b, at::kCPU, at::kCPU);
    const auto want = torch::autograd::grad({(out.mul(x) + out.cos()).sum()}, {x, a, b}, {},
                                            /*retain_graph=*/false);

    Context context = cluster_[0].NewContext();
    // Every other time what is sent is on a device.
    const at::Tensor sent = round % 2 == 0 ? x : x.to(Device(3));
    auto reply = cluster_[0].Call("worker1", "compute", {"", {sent}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->tensors[1].device(), Device(2));
    const at::Tensor there = reply->tensors[0].mul(x).to(Device(2)) + reply->tensors[1];
    const at::Tensor root = there.sum();
    ASSERT_EQ(root.device(), Device(2));
    const absl::Status done = context.Backward({root});
    ASSERT_TRUE(done.ok()) << done;

    absl::StatusOr<at::Tensor> got = context.Gradient(x);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(got->allclose(want[0], 1e-6, 1e-7)) << *got << want[0];
    auto gradients = cluster_[0].Call("worker1", "gradients", {}, {.context = &context});
    ASSERT_TRUE(gradients.ok()) << gradients.status();
    EXPECT_TRUE(gradients->tensors[0].allclose(want[1], 1e-6, 1e-7));
    EXPECT_TRUE(gradients->tensors[1].allclose(want[2], 1e-6, 1e-7));
  }
}

TEST_F(DeviceTest, RootsOnSeveralDevices) {
  at::Tensor x = Leaf(7);
  Context context = cluster_[0].NewContext();
  auto reply = cluster_[0].Call("worker1", "compute", {"", {x}}, {.context = &context});
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::Status done = context.Backward(
      {reply->tensors[0].sum(), reply->tensors[1].sum(), x.to(Device(1)).exp().sum()});
  ASSERT_TRUE(done.ok()) << done;
  at::Tensor y = Leaf(7), a = on_device_.detach().to(at::kCPU), b = on_cpu_.detach();
  const at::Tensor out = Compute(y, a, b, at::kCPU, at::kCPU);
  const auto want = torch::autograd::grad({out.sum() + out.cos().sum() + y.exp().sum()}, {y});
  EXPECT_TRUE(context.Gradient(x)->allclose(want[0], 1e-6, 1e-7));
}

}  // namespace
}  // namespace distgrad
