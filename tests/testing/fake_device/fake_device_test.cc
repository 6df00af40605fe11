#include "tests/testing/fake_device/fake_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <thread>

#include "gtest/gtest.h"

namespace distgrad::fake_device {
namespace {

using at::Tensor;

Tensor Ones(int device) { return at::ones({3}, at::TensorOptions(Device(device))); }

c10::Event RecordOn(c10::Stream stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

TEST(FakeDevice, ComputesAsTheCpuDoes) {
  const Tensor t = at::arange(12, at::TensorOptions(Device(3)).dtype(at::kFloat)).reshape({3, 4});
  EXPECT_EQ(t.device(), Device(3));
  EXPECT_EQ(t.t().contiguous().view({-1})[5].item<float>(), 9);
  EXPECT_EQ(t.slice(1, 1, 3).sum().item<float>(), 33);
  EXPECT_TRUE((t.mm(t.t()) / 2).cpu().equal(t.cpu().mm(t.cpu().t()) / 2));
  EXPECT_ANY_THROW(Ones(0) + Ones(1));
  EXPECT_ANY_THROW(Ones(9));
  EXPECT_TRUE(TakeViolations().empty());
}

TEST(FakeDevice, CountsItsMemory) {
  const int64_t before = AllocatedBytes(2);
  {
    const Tensor t = Ones(2);
    EXPECT_EQ(AllocatedBytes(2), before + 12);
  }
  EXPECT_EQ(AllocatedBytes(2), before);
}

TEST(FakeDevice, LibtorchsOwnBackwardRunsAcrossDevices) {
  const Tensor leaf = Ones(0).requires_grad_();
  torch::autograd::backward({((leaf * 2).to(Device(1)) * 3).cpu().sum()});
  EXPECT_TRUE(leaf.grad().cpu().equal(at::ones({3}) * 6));
  EXPECT_TRUE(TakeViolations().empty());
}

TEST(FakeDevice, ReadingWithoutWaitingThrows) {
  const Tensor t = Ones(0);
  const c10::StreamGuard guard(NewStream(0));
  EXPECT_ANY_THROW(t + 1);
  EXPECT_EQ(TakeViolations().size(), 1u);
}

TEST(FakeDevice, WritingWithoutWaitingThrows) {
  const c10::Stream side = NewStream(0);
  const Tensor t = Ones(0);
  const c10::Event ready = RecordOn(c10::Stream(c10::Stream::UNSAFE, Device(0), 0));
  {
    const c10::StreamGuard guard(side);
    ready.block(side);
    t + 1;
  }
  EXPECT_ANY_THROW(t.add_(1));
  EXPECT_EQ(TakeViolations().size(), 1u);
}

TEST(FakeDevice, EventsOrderStreamsAlsoOverSeveralSteps) {
  const c10::Stream first = NewStream(0), second = NewStream(0), third = NewStream(1);
  std::optional<c10::StreamGuard> guard(std::in_place, first);
  Tensor t = Ones(0);
  RecordOn(first).block(second);
  RecordOn(second).block(third);
  guard.reset();
  const c10::StreamGuard other(third);
  third.device();
  RecordOn(third).block(second);
  const c10::StreamGuard again(second);
  t.add_(1);
  EXPECT_TRUE(TakeViolations().empty());
}

TEST(FakeDevice, AHostThatWaitedOrdersWhatItLaunches) {
  const c10::Stream side = NewStream(0);
  const Tensor t = Ones(0);
  EXPECT_EQ(t[0].item<float>(), 1);
  {
    const c10::StreamGuard guard(side);
    const Tensor u = t + 1;
    std::thread([&] {
      const c10::StreamGuard third(NewStream(0));
      EXPECT_ANY_THROW(u + 1);
      Synchronize(0);
      u + 1;
    }).join();
    Synchronize(0);
  }
  EXPECT_EQ(TakeViolations().size(), 1u);
}

TEST(FakeDevice, FreeingWhatAnotherStreamUsesIsAViolationUnlessRecorded) {
  const c10::Stream side = NewStream(0);
  for (const bool record : {false, true}) {
    Tensor t = Ones(0);
    RecordOn(c10::Stream(c10::Stream::UNSAFE, Device(0), 0)).block(side);
    {
      const c10::StreamGuard guard(side);
      t + 1;
    }
    if (record) {
      const c10::impl::VirtualGuardImpl impl(Device(0).type());
      impl.recordDataPtrOnStream(t.storage().data_ptr(), side);
    }
    t.reset();
    EXPECT_EQ(TakeViolations().size(), record ? 0u : 1u);
  }
}

}  // namespace
}  // namespace distgrad::fake_device
