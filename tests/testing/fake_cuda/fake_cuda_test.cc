// That libtorch's CUDA runs on the stand-in, and that its streams find a wait that is missing.
#include "tests/testing/fake_cuda/fake_cuda.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <dlfcn.h>

#include <thread>

#include "gtest/gtest.h"

namespace distgrad::fake_cuda {
namespace {

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream NewStream(int index) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(index));
}

TEST(FakeCudaTest, TensorsGoToAllDevicesAndBack) {
  ASSERT_EQ(c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount(), kDevices);
  const at::Tensor x = at::rand({300, 700});
  at::Tensor there = x;
  for (int i = 0; i < kDevices; ++i) there = there.to(Gpu(i));
  EXPECT_EQ(there.device(), Gpu(kDevices - 1));
  EXPECT_TRUE(there.cpu().equal(x));
  EXPECT_TRUE(there.slice(0, 100, 200).cpu().equal(x.slice(0, 100, 200)));
}

TEST(FakeCudaTest, StreamsAreLateAndInOrder) {
  const at::Tensor x = at::ones({1000}).pin_memory();
  const c10::Stream first = NewStream(0), second = NewStream(0);
  at::Tensor there = at::empty({1000}, Gpu(0)), back = at::empty({1000}).pin_memory();
  back.zero_();
  {
    const Standstill standstill;
    {
      const c10::StreamGuard guard(first);
      there.copy_(x, /*non_blocking=*/true);
    }
    EXPECT_FALSE(first.query());
    EXPECT_TRUE(second.query());
    c10::Event event(at::kCUDA);
    event.record(first);
    EXPECT_FALSE(event.query());
    event.block(second);
    const c10::StreamGuard guard(second);
    back.copy_(there, /*non_blocking=*/true);
    EXPECT_EQ(back[0].item<float>(), 0);
  }
  second.synchronize();
  EXPECT_TRUE(back.equal(x));
}

TEST(FakeCudaTest, AWaitThatIsMissingIsFound) {
  const at::Tensor ones = at::ones({1000}).pin_memory();
  const c10::Stream first = NewStream(0), second = NewStream(0);
  at::Tensor there = at::empty({1000}, Gpu(0)), back = at::empty({1000}).pin_memory();
  there.copy_(at::arange(1000));
  {
    const Standstill standstill(first.native_handle());
    {
      const c10::StreamGuard guard(first);
      there.copy_(ones, true);
    }
    const c10::StreamGuard guard(second);
    back.copy_(there, true);
    second.synchronize();
    EXPECT_TRUE(back.equal(at::arange(1000)));
  }
  first.synchronize();
  EXPECT_TRUE(there.cpu().equal(ones));
}

// As CUDA says of its three modes, and of cudaThreadExchangeStreamCaptureMode().
TEST(FakeCudaTest, CapturesRefuseWhatIsNotSafeBesideThem) {
  c10::Event event(at::kCUDA);
  event.record(NewStream(0));
  event.synchronize();
  const c10::Stream stream = NewStream(1);
  const auto refuses = [&](CaptureMode mode, bool elsewhere, cudaStreamCaptureMode of_thread) {
    const Capture capture(stream.native_handle(), mode);
    bool refused = false;
    const auto query = [&] {
      const c10::cuda::CUDAStreamCaptureModeGuard guard(of_thread);
      try {
        event.query();
      } catch (const c10::Error&) {
        refused = true;
      }
    };
    if (elsewhere) {
      std::thread(query).join();
    } else {
      query();
    }
    EXPECT_EQ(capture.intact(), !refused);
    return refused;
  };
  constexpr auto kAny = cudaStreamCaptureModeGlobal;  // what threads begin with
  constexpr auto kOwn = cudaStreamCaptureModeThreadLocal, kNone = cudaStreamCaptureModeRelaxed;
  for (const bool elsewhere : {false, true}) {
    EXPECT_TRUE(refuses(CaptureMode::kGlobal, elsewhere, kAny));
    EXPECT_EQ(refuses(CaptureMode::kGlobal, elsewhere, kOwn), !elsewhere);
    EXPECT_EQ(refuses(CaptureMode::kThreadLocal, elsewhere, kAny), !elsewhere);
    EXPECT_EQ(refuses(CaptureMode::kThreadLocal, elsewhere, kOwn), !elsewhere);
    EXPECT_FALSE(refuses(CaptureMode::kThreadLocal, elsewhere, kNone));
    EXPECT_FALSE(refuses(CaptureMode::kGlobal, elsewhere, kNone));
    EXPECT_FALSE(refuses(CaptureMode::kRelaxed, elsewhere, kAny));
  }
  const Capture relaxed(stream.native_handle(), CaptureMode::kRelaxed);
  EXPECT_THROW(stream.query(), c10::Error) << "it is the one that is captured";
  EXPECT_FALSE(relaxed.intact());
}

TEST(FakeCudaDeathTest, NobodyElseTouchesADevicesMemory) {
  EXPECT_DEATH(*static_cast<volatile char*>(at::empty({10}, Gpu(0)).data_ptr()), "");
}

TEST(FakeCudaDeathTest, WhatItLacksEndsTheProcessByName) {
  EXPECT_DEATH(at::ones({10}, Gpu(0)), "fake CUDA: there is no __cuda");
}

// That of a machine with a GPU would not know these devices, and libtorch asks it for them when a
// device has no memory left.
TEST(FakeCudaTest, NvmlIsAFakeToo) {
  void* const linked = dlsym(RTLD_DEFAULT, "nvmlDeviceGetHandleByPciBusId_v2");
  ASSERT_NE(linked, nullptr) << "this program is not linked with the fake NVML";
  void* const nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(nvml, nullptr) << dlerror();
  ASSERT_EQ(dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2"), linked);
  auto* const handle_of = reinterpret_cast<int (*)(const char*, const void**)>(linked);
  const void* device = nullptr;
  EXPECT_EQ(handle_of("00000000:63:00.0", &device), 0);
}

TEST(FakeCudaTest, MemoryIsLimited) {
  EXPECT_THROW(at::empty({int64_t{2} << 30}, at::TensorOptions(at::kByte).device(Gpu(1))),
               c10::OutOfMemoryError);
  at::empty({int64_t{64} << 20}, at::TensorOptions(at::kByte).device(Gpu(1)));
}

}  // namespace
}  // namespace distgrad::fake_cuda
