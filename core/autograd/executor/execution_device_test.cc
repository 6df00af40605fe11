// Executions over a simulated accelerator. It computes on the CPU, so gradients must be equal to
// the CPU's to the last bit, and it throws when streams are not ordered.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/autograd/executor/device_threads.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/executor_testing.h"
#include "core/autograd/executor/graph.h"
#include "core/base/blocking.h"
#include "core/base/fake_clock.h"
#include "core/base/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_device/fake_device.h"
#include "tests/testing/no_threads.h"

namespace distgrad {
namespace {

using at::Tensor;
using fake_device::Device;
using fake_device::NewStream;
using torch::autograd::variable_list;

const at::Device kCpu(at::kCPU);

Tensor Full(double value, at::Device device = kCpu) {
  return at::full({2}, value, at::TensorOptions(device).dtype(at::kDouble));
}
Tensor Leaf(double value, at::Device device = kCpu) { return Full(value, device).requires_grad_(); }

c10::Stream CurrentStream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Whoever reads a gradient waits for the stream on which the sink got it.
class EventSink : public RecordingSink {
 public:
  void OnLeaf(torch::autograd::AccumulateGrad& leaf, Tensor gradient) override {
    if (!gradient.is_cpu()) {
      c10::Event event(gradient.device().type());
      event.record(CurrentStream(gradient.device()));
      const std::lock_guard<std::mutex> lock(mu_);
      events_.push_back(std::move(event));
    }
    RecordingSink::OnLeaf(leaf, std::move(gradient));
  }
  Tensor OnCpu(const Tensor& leaf) {
    const Tensor gradient = Of(leaf);
    if (!gradient.defined() || gradient.is_cpu()) return gradient;
    for (c10::Event& event : events_) event.block(CurrentStream(gradient.device()));
    return gradient.cpu();
  }

 private:
  std::mutex mu_;
  std::vector<c10::Event> events_;
};

// With threads for devices, and without: then all runs on the thread that feeds.
class DeviceExecution : public testing::TestWithParam<bool> {
 protected:
  ~DeviceExecution() override {
    for (int i = 0; i < fake_device::kDevices; ++i) fake_device::Synchronize(i);
    EXPECT_THAT(fake_device::TakeViolations(), testing::IsEmpty());
  }

  std::unique_ptr<Execution> Make(std::shared_ptr<const Graph> graph) {
    ExecutionOptions options;
    if (GetParam()) options.device_threads = &threads_;
    sink_.on_idle = [this] { idle_.Notify(); };  // dies if it comes twice
    return std::make_unique<Execution>(std::move(graph), options, &sink_);
  }

  // Feeds ones to all roots at once, as one source.
  absl::Status Run(const std::vector<Tensor>& roots) {
    const auto execution = Make(GraphOf({roots}));
    variable_list gradients;
    for (const Tensor& root : roots) gradients.push_back(Full(1, root.device()));
    const absl::InlinedVector<bool, 8> reached(roots.size(), true);
    execution->Feed(0, std::move(gradients), reached);
    idle_.WaitForNotification();
    EXPECT_TRUE(execution->idle());
    return execution->status();
  }

  absl::Notification idle_;
  EventSink sink_;
  FakeClock clock_;
  ThreadPool pool_{"cpu", 2};
  DeviceThreads threads_{&pool_, &clock_};
};

INSTANTIATE_TEST_SUITE_P(All, DeviceExecution, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "DeviceThreads" : "FeedingThread");
});

struct Crossing {
  Crossing(at::Device first, at::Device second)
      : a(Leaf(3)), b(Leaf(5, first)), c(Leaf(7, second)) {
    Tensor t = (a * 2).to(first) * b;
    t = t.to(kCpu) * 3 + a;
    t = t.to(second) * c;
    t = (t.to(kCpu) + a).to(first) * b;
    root = t.to(second) + c * b.to(second);
  }
  const Tensor a, b, c;
  Tensor root;
};

TEST_P(DeviceExecution, CpuAndDevicesByTurns) {
  const Crossing expected(kCpu, kCpu);
  torch::autograd::backward({expected.root}, {Full(1)});
  const Crossing actual(Device(0), Device(1));
  const absl::Status status = Run({actual.root, actual.root.to(kCpu)});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(sink_.OnCpu(actual.a).equal(expected.a.grad() * 2));
  EXPECT_TRUE(sink_.OnCpu(actual.b).equal(expected.b.grad() * 2));
  EXPECT_TRUE(sink_.OnCpu(actual.c).equal(expected.c.grad() * 2));
  EXPECT_EQ(sink_.Of(actual.c).device(), Device(1));
  EXPECT_EQ(sink_.idle, 1);
}

TEST_P(DeviceExecution, NodesRunOnTheirThreadsAndStreams) {
  const std::thread::id feeder = std::this_thread::get_id();
  const c10::Stream stream = NewStream(2);
  int ran = 0;
  const auto expect_cpu = [&](bool handed_over) {
    ++ran;
    EXPECT_EQ(std::this_thread::get_id() == feeder, !handed_over || !GetParam());
    EXPECT_EQ(pool_.OnThisPool(), handed_over && GetParam());
  };
  Spy::Body on_cpu_late = [&](const variable_list&) { expect_cpu(true); };
  Spy::Body on_cpu_early = [&](const variable_list&) { expect_cpu(false); };
  Spy::Body on_device = [&](const variable_list&) {
    ++ran;
    EXPECT_EQ(threads_.Of(Device(2))->OnThisPool(), GetParam());
    EXPECT_EQ(CurrentStream(Device(2)), stream);
    EXPECT_EQ(c10::impl::VirtualGuardImpl(stream.device_type()).getDevice(), Device(2));
  };
  const Tensor leaf = Leaf(1);
  const Tensor late = Watch(leaf, &on_cpu_late);
  Tensor on_stream;
  {
    const c10::StreamGuard guard(stream);
    on_stream = Watch(late.to(Device(2)), &on_device).to(kCpu);
  }
  const absl::Status status = Run({Watch(on_stream, &on_cpu_early)});
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ran, 3);
  EXPECT_TRUE(sink_.Of(leaf).equal(Full(1)));
}

TEST_P(DeviceExecution, StopNodesAndUnreachedBranches) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1, Device(0)), leaf = Leaf(1), unused = Leaf(1, Device(1));
  StopNode::MakeHistory(stop, received);
  const auto execution =
      Make(GraphOf({{received * 2 + leaf.to(Device(0))}, {(unused * 2).to(kCpu)}}));
  // Fed while the first root is being run: one burst.
  sink_.on_stop = [&] { execution->Feed(1, {Tensor()}, {false}); };
  execution->Feed(0, {Full(1, Device(0))}, {true});
  idle_.WaitForNotification();
  EXPECT_TRUE(execution->status().ok()) << execution->status();
  ASSERT_EQ(sink_.stops[stop.get()].size(), 1u);
  EXPECT_TRUE(sink_.stops[stop.get()][0].gradients[0].cpu().equal(Full(2)));
  EXPECT_TRUE(sink_.Of(leaf).equal(Full(1)));
  EXPECT_FALSE(sink_.Of(unused).defined());
}

// Each thread says that it goes away, though others go on.
TEST_P(DeviceExecution, ALaneSaysThatItHasEnded) {
  struct Sink : RecordingSink {
    void OnNext(torch::autograd::Node* next) override {
      if (next == nullptr) ended.Notify();
    }
    absl::Notification ended;
  };
  if (!GetParam()) GTEST_SKIP() << "nothing is handed over without threads for devices";
  Sink sink;
  absl::Notification idle;
  sink.on_idle = [&] { idle.Notify(); };
  ExecutionOptions options;
  options.device_threads = &threads_;
  // The CPU's part is not over before the device's.
  bool in_time = false;
  Spy::Body wait = [&](const variable_list&) {
    in_time = sink.ended.WaitForNotificationWithTimeout(absl::Seconds(20));
  };
  const Tensor a = Leaf(1, Device(0)), b = Leaf(1);
  // The younger node runs first, and hands the device's over.
  const Tensor slow = Watch(b, &wait);
  const Tensor fast = a.to(kCpu);
  Execution execution(GraphOf({{slow, fast}}), options, &sink);
  execution.Feed(0, {Full(1), Full(1)}, {true, true});
  idle.WaitForNotification();
  EXPECT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_TRUE(in_time);
}

TEST_P(DeviceExecution, AnErrorOnADevice) {
  Spy::Body fail = [](const variable_list&) { throw std::runtime_error("no"); };
  const Tensor leaf = Leaf(1);
  const Tensor root = Watch((leaf * 2).to(Device(0)), &fail).to(Device(1)).to(kCpu);
  const absl::Status status = Run({root});
  EXPECT_TRUE(absl::EndsWith(status.message(), ": no")) << status;
  EXPECT_TRUE(sink_.leaves.empty());
  EXPECT_EQ(sink_.idle, 1);
}

TEST_P(DeviceExecution, CancelOnADevice) {
  std::unique_ptr<Execution> execution;
  Spy::Body cancel = [&](const variable_list&) {
    execution->Cancel(absl::DeadlineExceededError("late"));
  };
  const Tensor root = Watch((Leaf(1) * 2).to(Device(0)), &cancel).to(kCpu);
  execution = Make(GraphOf({{root}}));
  execution->Feed(0, {Full(1)}, {true});
  idle_.WaitForNotification();
  EXPECT_EQ(execution->status(), absl::DeadlineExceededError("late"));
  EXPECT_TRUE(sink_.leaves.empty());
}

TEST_P(DeviceExecution, AClosedPoolIsAnError) {
  if (!GetParam()) GTEST_SKIP() << "uses no pool";
  const Tensor root = (Leaf(1) * 2).to(Device(0)) * 2;
  pool_.Close();
  const absl::Status status = Run({root});
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(absl::StrContains(status.message(), "closed")) << status;
}

TEST_P(DeviceExecution, AThreadThatIsNotToBeHadIsAnError) {
  const Tensor root = Leaf(1, Device(0)) * 2;
  const NoThreads no_threads;
  const absl::Status status = Run({root});
  if (!GetParam()) {
    EXPECT_TRUE(status.ok()) << status << ", though it needs none";
    return;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "no thread for 'dg-")) << status;
}

// The device's only thread waits for a node of another pass, for which it is refused a second one.
TEST_P(DeviceExecution, AThreadThatWasRefusedIsAskedForAgain) {
  absl::Notification waits, other_ran, other_idle;
  Spy::Body wait = [&](const variable_list&) {
    const BlockingScope blocking;
    waits.Notify();
    EXPECT_TRUE(other_ran.WaitForNotificationWithTimeout(absl::Minutes(1)));
  };
  Spy::Body notify = [&](const variable_list&) { other_ran.Notify(); };
  EventSink other_sink;
  other_sink.on_idle = [&] { other_idle.Notify(); };
  ExecutionOptions options;
  if (GetParam()) options.device_threads = &threads_;
  const auto first = Make(GraphOf({{Watch(Leaf(1, Device(0)), &wait)}}));
  Execution other(GraphOf({{Watch(Leaf(1, Device(0)), &notify)}}), options, &other_sink);
  std::thread feeder([&] { first->Feed(0, {Full(1, Device(0))}, {true}); });
  waits.WaitForNotification();
  variable_list gradients = {Full(1, Device(0))};
  {
    const NoThreads no_threads;
    other.Feed(0, std::move(gradients), {true});
  }
  clock_.Advance(ThreadPool::kRetryDelay);
  feeder.join();
  idle_.WaitForNotification();
  other_idle.WaitForNotification();
  EXPECT_TRUE(first->status().ok()) << first->status();
  EXPECT_TRUE(other.status().ok()) << other.status();
}

// ---- random programs over devices and streams ----

// Whole numbers in doubles: sums do not depend on the order in which lanes make them.
struct RandomPlacement {
  // Of each device the default stream and another, the same for all programs.
  static const std::vector<std::vector<c10::Stream>>& Streams() {
    static const std::vector<std::vector<c10::Stream>> streams = {
        {CurrentStream(Device(0)), NewStream(0)},
        {CurrentStream(Device(1)), NewStream(1)},
        {CurrentStream(Device(2)), NewStream(2)}};
    return streams;
  }

  struct Value {
    Tensor tensor;
    c10::Stream stream;  // on which it was made, if on a device
  };

  RandomPlacement(uint64_t seed, bool devices) {
    std::mt19937_64 random(seed);
    std::vector<Value> values;
    for (int i = 0; i < 3; ++i) {
      leaves.push_back(Leaf(i + 1, devices && i > 0 ? Device(i) : kCpu));
      values.push_back({leaves.back(), Streams()[i][0]});
    }
    for (int i = 0; i < 30; ++i) {
      const Value& x = values[values.size() - 1 - random() % std::min<size_t>(values.size(), 6)];
      const Value& y = values[values.size() - 1 - random() % std::min<size_t>(values.size(), 6)];
      const c10::Stream stream = Streams()[random() % 3][random() % 2];
      const bool on_cpu = random() % 3 == 0 || !devices;
      const uint64_t kind = random() % 4;
      const at::Device device = on_cpu ? kCpu : stream.device();
      const Tensor a = Bring(x, device, stream), b = Bring(y, device, stream);
      const c10::StreamGuard guard(stream);
      values.push_back({kind == 0   ? a + b
                        : kind == 1 ? a - b
                        : kind == 2 ? a * 2 - b
                                    : a * Full(-1, device) + b * Full(3, device),
                        stream});
    }
    for (int i = 0; i < 3; ++i) {
      const Value& root = values[values.size() - 1 - i];
      // Roots are fed on the current streams.
      roots.push_back(Bring(root, root.tensor.device(), Streams()[root.stream.device_index()][0]));
    }
  }

  // `value` on a device, ready for use on a stream of it.
  static Tensor Bring(const Value& value, at::Device device, c10::Stream stream) {
    const at::Device from = value.tensor.device();
    if (from.is_cpu() && device.is_cpu()) return value.tensor;
    if (from != device) {
      std::vector<c10::Stream> current = {from.is_cpu() ? stream : value.stream};
      if (!from.is_cpu() && !device.is_cpu()) current.push_back(stream);
      const c10::MultiStreamGuard guard(current);
      return value.tensor.to(device);
    }
    c10::Event event(stream.device_type());
    event.record(value.stream);
    event.block(stream);
    const c10::impl::VirtualGuardImpl impl(stream.device_type());
    impl.recordDataPtrOnStream(value.tensor.storage().data_ptr(), stream);
    return value.tensor;
  }

  std::vector<Tensor> leaves, roots;
};

class DevicePlacement : public testing::TestWithParam<bool> {
 protected:
  // Feeds each source from a thread of its own, and compares with the same program on the CPU.
  void Compare(uint64_t seed, bool one_source) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const RandomPlacement expected(seed, false), actual(seed, true);
    torch::autograd::backward(expected.roots, {Full(1), Full(1), Full(1)});
    std::vector<std::vector<Tensor>> sources;
    if (one_source) sources = {actual.roots};
    for (size_t i = 0; !one_source && i < 3; ++i) sources.push_back({actual.roots[i]});

    EventSink sink;
    absl::Mutex mu;
    sink.on_idle = [&mu] { absl::MutexLock lock(&mu); };  // has the condition below looked at
    ThreadPool pool("cpu", 2);
    FakeClock clock;
    DeviceThreads threads(&pool, &clock);
    ExecutionOptions options;
    if (GetParam()) options.device_threads = &threads;
    Execution execution(GraphOf(sources), options, &sink);
    std::vector<std::thread> feeders;
    for (Graph::Index source = 0; source < sources.size(); ++source) {
      feeders.emplace_back([&, source] {
        variable_list gradients;
        for (const Tensor& root : sources[source]) gradients.push_back(Full(1, root.device()));
        const absl::InlinedVector<bool, 8> reached(gradients.size(), true);
        execution.Feed(source, std::move(gradients), reached);
      });
    }
    for (std::thread& feeder : feeders) feeder.join();
    mu.LockWhen(absl::Condition(&execution, &Execution::idle));
    mu.Unlock();

    ASSERT_TRUE(execution.status().ok()) << execution.status();
    for (size_t i = 0; i < actual.leaves.size(); ++i) {
      const Tensor& want = expected.leaves[i].grad();
      const Tensor got = sink.OnCpu(actual.leaves[i]);
      ASSERT_EQ(want.defined(), got.defined());
      if (want.defined()) {
        ASSERT_TRUE(got.equal(want));
      }
    }
    for (int i = 0; i < fake_device::kDevices; ++i) fake_device::Synchronize(i);
    ASSERT_THAT(fake_device::TakeViolations(), testing::IsEmpty());
  }
};

INSTANTIATE_TEST_SUITE_P(All, DevicePlacement, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "DeviceThreads" : "FeedingThread");
});

TEST_P(DevicePlacement, RandomDevicesAndStreams) {
  for (uint64_t seed = 1; seed <= 40; ++seed) Compare(seed, /*one_source=*/true);
}

TEST_P(DevicePlacement, RootsFedFromSeveralThreads) {
  for (uint64_t seed = 100; seed < 130; ++seed) Compare(seed, /*one_source=*/false);
}

}  // namespace
}  // namespace distgrad
