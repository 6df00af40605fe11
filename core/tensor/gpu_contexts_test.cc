// Messages with tensors of other GPUs than the first leave no context on the first one, on threads
// that have chosen no GPU, as those of transports; on the stand-in for CUDA. A process of its own,
// whose GPUs no other test has used.
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"
#include "core/tensor/gpu_memory.h"
#include "core/tensor/message_codec.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

const at::Device kSecond(at::kCUDA, 1);

// On a new thread: after a guard of c10's one has that guard's GPU as its current one yet.
void OnThread(absl::FunctionRef<void()> run) {
  std::thread thread([&] { run(); });
  thread.join();
}

// Here the process uses CUDA for the first time.
TEST(GpuContextsTest, WhatArrivesIsWaitedFor) {
  const std::unique_ptr<DeviceMemory> gpus = NewGpuMemory();
  Packet packet;
  OnThread([&] {
    auto segment = gpus->Allocate(1, 1000);
    ASSERT_TRUE(segment.ok()) << segment.status();
    packet.segments.push_back(*std::move(segment));
  });
  EXPECT_FALSE(fake_cuda::HasContext(0)) << "to allocate has made one";
  absl::Notification arrived;
  OnThread([&] {
    gpus->AfterArrival(packet, [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      arrived.Notify();
    });
  });
  arrived.WaitForNotification();
  EXPECT_FALSE(fake_cuda::HasContext(0));
}

// A small tensor is copied to the host and from there, each of which is waited for.
TEST(GpuContextsTest, SmallTensorsAreWrittenAndRead) {
  const at::Tensor on_host = at::rand({10});
  at::Tensor there;
  OnThread([&] { there = on_host.to(kSecond); });
  ASSERT_FALSE(fake_cuda::HasContext(0)) << "libtorch, or the test before, has made one";
  Packet packet;
  OnThread([&] {
    DeviceMap map = DeviceMap::Of({{kSecond, kSecond}}).value();
    map.set_carries_gpus(true);
    const absl::Status appended = AppendMessage({"x", {there}}, &packet, map);
    ASSERT_TRUE(appended.ok()) << appended;
  });
  EXPECT_FALSE(fake_cuda::HasContext(0)) << "to write has made one";
  at::Tensor read;
  OnThread([&] {
    WireReader reader(packet.bytes);
    SegmentReader segments(absl::MakeSpan(packet.segments));
    const absl::StatusOr<Message> message = ReadMessage(reader, segments, {});
    ASSERT_TRUE(message.ok()) << message.status();
    read = message->tensors[0];
  });
  EXPECT_FALSE(fake_cuda::HasContext(0));
  ASSERT_EQ(read.device(), kSecond);
  EXPECT_TRUE(read.cpu().equal(on_host));
}

}  // namespace
}  // namespace distgrad
