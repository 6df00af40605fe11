// Programs that order their streams, and those that forget to and are found out.
#include "tests/testing/fake_device/fake_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad::fake_device {
namespace {

using at::Tensor;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Tensor Ones(int device) { return at::ones({3}, at::TensorOptions(Device(device))); }

c10::Stream DefaultStream() {
  return c10::impl::VirtualGuardImpl(Device(0).type()).getDefaultStream(Device(0));
}

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
  EXPECT_THAT(TakeViolations(), IsEmpty());
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
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the reference counts of libtorch's engine are not instrumented";
#endif
  const Tensor leaf = Ones(0).requires_grad_();
  torch::autograd::backward({((leaf * 2).to(Device(1)) * 3).cpu().sum()});
  EXPECT_TRUE(leaf.grad().cpu().equal(at::ones({3}) * 6));
  EXPECT_THAT(TakeViolations(), IsEmpty());
}

TEST(FakeDevice, ReadingWithoutWaitingThrows) {
  const Tensor t = Ones(0);
  const c10::StreamGuard guard(NewStream(0));
  EXPECT_ANY_THROW(t + 1);
  EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("reads what stream 0")));
}

TEST(FakeDevice, WritingWithoutWaitingThrows) {
  const c10::Stream side = NewStream(0);
  const Tensor t = Ones(0);
  RecordOn(DefaultStream()).block(side);
  {
    const c10::StreamGuard guard(side);
    t + 1;
  }
  EXPECT_ANY_THROW(t.add_(1));
  EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("writes over what stream")));
  Synchronize(0);
}

TEST(FakeDevice, EventsOrderStreamsAlsoOverSeveralSteps) {
  const c10::Stream second = NewStream(0), third = NewStream(1), fourth = NewStream(0);
  const Tensor t = Ones(0);
  RecordOn(DefaultStream()).block(second);
  RecordOn(second).block(third);
  RecordOn(third).block(fourth);
  {
    const c10::StreamGuard guard(fourth);
    t.add_(1);
  }
  RecordOn(fourth).block(DefaultStream());
  t.add_(1);
  EXPECT_THAT(TakeViolations(), IsEmpty());
}

TEST(FakeDevice, WhatAHostThreadWaitedForComesBeforeWhatItLaunches) {
  const Tensor t = Ones(0);
  std::thread([&t] {
    const c10::StreamGuard guard(NewStream(0));
    EXPECT_ANY_THROW(t + 1);
    Synchronize(0);
    t + 1;
  }).join();
  EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("reads what stream 0")));
  Synchronize(0);
}

TEST(FakeDevice, FreeingWhatAnotherStreamUsesIsAViolationUnlessRecorded) {
  const c10::Stream side = NewStream(0);
  for (const bool record : {false, true}) {
    Tensor t = Ones(0);
    RecordOn(DefaultStream()).block(side);
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
