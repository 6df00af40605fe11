// Backward through workers whose graphs lie on accelerators, simulated ones: roots, leaves and
// tensors that cross are on devices, and the path changes between them and the CPU. Gradients are
// the CPU's, up to the order of additions, and no stream may be left unordered.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "core/membership/store/in_process_store.h"
#include "core/transport/inproc/inproc_transport.h"
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
  void TearDown() override {
    EXPECT_THAT(fake_device::TakeViolations(), ::testing::IsEmpty());
    // The parameters go without waiting for streams that used them.
    for (int i = 0; i < fake_device::kDevices; ++i) fake_device::Synchronize(i);
  }

  at::Tensor on_device_ = Leaf(1, Device(0)), on_cpu_ = Leaf(2);
  // Worker 0's devices are worker 1's, the other way round; only worker 0 says so.
  static at::Device There(int here) { return Device(fake_device::kDevices - 1 - here); }
  static DevicePairs Crossed() {
    DevicePairs pairs;
    for (int i = 0; i < fake_device::kDevices; ++i) pairs.emplace_back(Device(i), There(i));
    return pairs;
  }
  Cluster cluster_{ClusterOptions{.workers = 2, .device_maps = {{"worker1", Crossed()}}}};
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
    EXPECT_EQ(reply->tensors[1].device(), Device(1)) << "by the way back of There(1)";
    const at::Tensor there = reply->tensors[0].mul(x).to(Device(1)) + reply->tensors[1];
    const at::Tensor root = there.sum();
    ASSERT_EQ(root.device(), Device(1));
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

// Everything is on streams of its own, and whoever reads a gradient on yet another.
TEST_F(DeviceTest, GradientsAreThereOnTheReadersStream) {
  const c10::impl::VirtualGuardImpl impl(Device(0).type());
  const auto order = [&](c10::Stream first, c10::Stream second) {
    c10::Event event(first.device_type());
    event.record(first);
    event.block(second);
  };
  // A new stream of a device, behind what its default stream has been given.
  const auto new_stream = [&](int device) {
    const c10::Stream stream = fake_device::NewStream(device);
    order(impl.getDefaultStream(stream.device()), stream);
    return stream;
  };
  // Where the gradients of on_device_ are added up.
  std::optional<c10::Stream> home;
  ASSERT_TRUE(cluster_[1]
                  .Register("on a stream",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              home = new_stream(0);
                              const c10::StreamGuard guard(*home);
                              const at::Tensor x = r.message.tensors[0].to(Device(0));
                              return Message{"", {(x * on_device_).sin().to(at::kCPU)}};
                            })
                  .ok());
  ASSERT_TRUE(cluster_[1]
                  .Register("read",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              const c10::Stream readers = fake_device::NewStream(0);
                              const c10::StreamGuard guard(readers);
                              const auto gradient = r.context.Gradient(on_device_);
                              if (!gradient.ok()) return gradient.status();
                              const auto all = r.context.Gradients();
                              if (!all.ok()) return all.status();
                              EXPECT_EQ(all->size(), 1u);
                              const at::Tensor read = (*gradient + (*all)[0].second).to(at::kCPU);
                              // The next pass adds in place, on a thread of which the fake device
                              // does not know that it comes after this one's wait.
                              order(readers, *home);
                              return Message{"", {read}};
                            })
                  .ok());
  // The caller's stream is not the handler's.
  const c10::Stream callers = new_stream(2);
  ASSERT_TRUE(cluster_[0]
                  .Register("itself",
                            [&](Request& r) -> absl::StatusOr<Message> {
                              order(callers, impl.getStream(callers.device()));
                              return Message{"", {r.message.tensors[0] * 3}};
                            })
                  .ok());
  const at::Tensor x = Leaf(5);
  Context context = cluster_[0].NewContext();
  const c10::StreamGuard guard(callers);
  auto there = cluster_[0].Call("worker1", "on a stream", {"", {x}}, {.context = &context});
  ASSERT_TRUE(there.ok()) << there.status();
  const at::Tensor here = there->tensors[0].to(Device(2)).exp();
  // The edge to itself has its recv node on this stream.
  auto again = cluster_[0].Call("worker0", "itself", {"", {here}}, {.context = &context});
  ASSERT_TRUE(again.ok()) << again.status();
  order(impl.getDefaultStream(callers.device()), callers);
  const at::Tensor root = (here * 2 + again->tensors[0].to(at::kCPU).to(Device(2))).sum();
  const at::Tensor a = on_device_.detach().to(at::kCPU).requires_grad_();
  const at::Tensor want = torch::autograd::grad({((x * a).sin().exp() * 5).sum()}, {a})[0];
  for (int pass = 1; pass <= 4; ++pass) {
    // By the caller, and by the pool, whose threads have other streams.
    const absl::Status done =
        pass % 2 == 1 ? context.Backward({root}, {.retain_graph = true})
                      : context.BackwardAsync({root}, {.retain_graph = true}).Wait().status();
    ASSERT_TRUE(done.ok()) << done;
    auto read = cluster_[0].Call("worker1", "read", {}, {.context = &context});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_TRUE(read->tensors[0].allclose(want * (2 * pass), 1e-5, 1e-6)) << "pass " << pass;
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

TEST_F(DeviceTest, TensorsAndGradientsGoByTheMap) {
  ASSERT_TRUE(cluster_[1]
                  .Register("where",
                            [](Request& r) -> absl::StatusOr<Message> {
                              at::Tensor& x = r.message.tensors[0];
                              const at::Device here = x.device();
                              // What its gradient is on when it leaves.
                              x.register_hook([here](const at::Tensor& gradient) {
                                EXPECT_EQ(gradient.device(), here);
                              });
                              return Message{here.str(), {x * 2}};
                            })
                  .ok());
  for (int i = 0; i < fake_device::kDevices; ++i) {
    const at::Tensor x = Leaf(i, Device(i)).detach().requires_grad_();
    Context context = cluster_[0].NewContext();
    auto reply = cluster_[0].Call(1, "where", {"", {x}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->payload, There(i).str());
    EXPECT_EQ(reply->tensors[0].device(), Device(i));
    const absl::Status done = context.Backward({reply->tensors[0].sum()});
    ASSERT_TRUE(done.ok()) << done;
    const absl::StatusOr<at::Tensor> gradient = context.Gradient(x);
    ASSERT_TRUE(gradient.ok()) << gradient.status();
    EXPECT_EQ(gradient->device(), Device(i));
    EXPECT_TRUE(gradient->to(at::kCPU).equal(at::full({3, 3}, 2.0f)));
  }
  // The other way round: worker 1 calls, though the map is worker 0's.
  ASSERT_TRUE(cluster_[0]
                  .Register("where",
                            [](Request& r) -> absl::StatusOr<Message> {
                              return Message{r.message.tensors[0].device().str(), {}};
                            })
                  .ok());
  auto reply = cluster_[1].Call(0, "where", {"", {at::ones({2}).to(Device(3))}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, Device(0).str());
  // To oneself, each device is itself.
  reply = cluster_[0].Call(0, "where", {"", {at::ones({2}).to(Device(2))}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->payload, Device(2).str());
}

// Its nodes run on a thread that is not the pool's.
TEST_F(DeviceTest, TheEndOfAWorkerWaitsForNodesOfAccelerators) {
  absl::Notification entered, release;
  const Context context = cluster_[0].NewContext();
  const at::Tensor y = on_device_ * 2;
  y.register_hook([&](const at::Tensor&) {
    entered.Notify();
    release.WaitForNotification();
  });
  const Future<Unit> pass = context.BackwardAsync({y.sum()});
  entered.WaitForNotification();
  // The pool's threads may take their time to end; the bound is for those alone.
  const absl::Status early = cluster_[0].Close(Deadline::After(absl::Seconds(1)));
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded) << early;
  release.Notify();
  const absl::Status late = cluster_[0].Close(Deadline::Never());
  EXPECT_TRUE(late.ok()) << late;
  EXPECT_EQ(pass.Wait().status().code(), absl::StatusCode::kCancelled) << pass.Wait().status();
  cluster_.Kill(0);
}

// Whichever event it is that fails, on whatever thread: the pass fails with it.
TEST(DeviceErrorsTest, AnEventThatFailsIsAnErrorOfThePass) {
  DevicePairs same;
  for (int i = 0; i < fake_device::kDevices; ++i) same.emplace_back(Device(i), Device(i));
  const at::Tensor x = Leaf(1, Device(0)).detach().requires_grad_();
  const at::Tensor on_device = Leaf(2, Device(1)), on_cpu = Leaf(3);
  int nth = 0;
  for (bool failed = true; failed; ++nth) {
    SCOPED_TRACE(nth);
    // Each has workers of its own, so that nothing of a pass that has failed still runs.
    Cluster cluster({.workers = 2, .device_maps = {{"worker1", same}}});
    ASSERT_TRUE(cluster[1]
                    .Register("compute",
                              [&](Request& r) -> absl::StatusOr<Message> {
                                const at::Tensor& in = r.message.tensors[0];
                                const at::Tensor out =
                                    Compute(in, on_device, on_cpu, Device(0), Device(1));
                                return Message{"", {out, in.cos()}};
                              })
                    .ok());
    Context context = cluster[0].NewContext();
    const auto reply = cluster[0].Call(1, "compute", {"", {x.sin()}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    const at::Tensor root = (reply->tensors[0].to(Device(0)) * reply->tensors[1]).sum();
    fake_device::FailEvent(nth);
    const absl::Status done =
        nth % 2 == 0 ? context.Backward({root}) : context.BackwardAsync({root}).Wait().status();
    failed = fake_device::FailEvent(-1);
    EXPECT_EQ(done.ok(), !failed) << done;
    if (failed) {
      EXPECT_EQ(done.code(), absl::StatusCode::kInternal) << done;
      EXPECT_NE(done.message().find("fake device: an event failed"), std::string::npos) << done;
      continue;
    }
    // And of whoever asks for a gradient.
    fake_device::FailEvent(0);
    EXPECT_EQ(context.Gradient(x).status().code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(fake_device::FailEvent(-1));
    EXPECT_TRUE(context.Gradient(x).ok());
    fake_device::FailEvent(0);
    EXPECT_EQ(context.Gradients().status().code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(fake_device::FailEvent(-1));
    EXPECT_TRUE(context.Gradients().ok());
    for (int i = 0; i < fake_device::kDevices; ++i) fake_device::Synchronize(i);
  }
  EXPECT_GT(nth, 10) << "a pass uses more events than that";
  fake_device::TakeViolations();  // what is dropped in the middle of a pass is in no order
}

// Each device has a thread of its own, and the one that fed both does something else by then.
TEST(DeviceErrorsTest, AThrowDoesNotWaitForOtherDevices) {
  absl::Notification blocked, go;
  {
    Cluster cluster({.workers = 2});
    ASSERT_TRUE(cluster[1]
                    .Register("compute",
                              [&](Request& r) -> absl::StatusOr<Message> {
                                const at::Tensor& x = r.message.tensors[0];
                                const at::Tensor slow = x.to(Device(0)), bad = x.to(Device(1));
                                slow.register_hook([&](const at::Tensor&) {
                                  blocked.Notify();
                                  go.WaitForNotification();
                                });
                                bad.register_hook([&](const at::Tensor&) {
                                  blocked.WaitForNotification();
                                  TORCH_CHECK(false, "thrown on purpose");
                                });
                                return Message{"", {slow.to(at::kCPU) + bad.to(at::kCPU)}};
                              })
                    .ok());
    Context context = cluster[0].NewContext();
    const auto reply = cluster[0].Call(1, "compute", {"", {Leaf(1).sin()}}, {.context = &context});
    ASSERT_TRUE(reply.ok()) << reply.status();
    const absl::Status done =
        context.Backward({reply->tensors[0].sum()}, {.deadline = absl::Now() + absl::Seconds(30)});
    EXPECT_NE(done.message().find("thrown on purpose"), std::string::npos) << done;
    go.Notify();
  }
  for (int i = 0; i < fake_device::kDevices; ++i) fake_device::Synchronize(i);
  fake_device::TakeViolations();  // what is dropped in the middle of a pass is in no order
}

TEST(DeviceMapsTest, WithoutAMapADeviceIsAnErrorThatNamesIt) {
  Cluster cluster({.workers = 2, .device_maps = {{"worker1", {{Device(0), Device(1)}}}}});
  const at::Tensor x = at::ones({2}).to(Device(2));
  const absl::Status status = cluster[0].Call(1, "f", {"", {at::ones({2}), x}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("tensor 1: it is on hpu:2"), std::string::npos) << status;
  EXPECT_NE(status.message().find("'worker1' (1)"), std::string::npos) << status;
}

TEST(DeviceMapsTest, AMapIsCheckedAgainstWhatBothEndsHave) {
  const std::shared_ptr<Store> store = NewInProcessStore();
  const auto network = std::make_shared<InprocNetwork>();
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      WorkerOptions options;
      options.name = i == 0 ? "a" : "b";
      options.store = store;
      options.rank = i;
      options.world_size = 2;
      options.transport = "inproc";
      options.network = network;
      if (i == 0) options.device_maps = {{"b", {{Device(0), Device(fake_device::kDevices)}}}};
      statuses[i] = Worker::Create(std::move(options)).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find("worker 'b' has no hpu:4"), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace distgrad
