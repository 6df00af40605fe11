// Messages with tensors on GPUs whose device map carries them as they are, on the stand-in for
// CUDA; and the memory that they arrive in.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "core/tensor/gpu_memory.h"
#include "core/tensor/message_codec.h"
#include "gtest/gtest.h"
#include "tests/testing/fake_cuda/fake_cuda.h"

namespace distgrad {
namespace {

at::Device Gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// GPU i goes with GPU i + 1 of the other end.
DeviceMap Shifted(bool carries_gpus = true) {
  DevicePairs pairs;
  for (int i = 0; i < fake_cuda::kDevices; ++i) {
    pairs.emplace_back(Gpu(i), Gpu((i + 1) % fake_cuda::kDevices));
  }
  DeviceMap map = DeviceMap::Of(pairs).value();
  map.set_carries_gpus(carries_gpus);
  return map;
}

// What a transport does: each segment in memory of its own, GPUs' on the other end's.
Packet Carry(const Packet& packet, DeviceMemory& gpus) {
  Packet carried;
  carried.bytes = packet.bytes;
  for (const Segment& segment : packet.segments) {
    if (segment.device < 0) {
      carried.segments.push_back(CopyPacket({"", {segment}}).segments[0]);
      continue;
    }
    carried.segments.push_back(gpus.Allocate(segment.target, segment.size).value());
    const auto as_tensor = [](const Segment& s) {
      auto* const storage = static_cast<c10::Storage*>(s.owner.get());
      const int64_t offset = s.data - static_cast<const uint8_t*>(storage->data());
      at::Tensor bytes = at::empty({0}, at::TensorOptions(at::kByte).device(Gpu(s.device)));
      return bytes.set_(*storage, offset, {static_cast<int64_t>(s.size)});
    };
    as_tensor(carried.segments.back()).copy_(as_tensor(segment));
  }
  return carried;
}

absl::StatusOr<Message> Read(Packet& packet) {
  WireReader reader(packet.bytes);
  SegmentReader segments(absl::MakeSpan(packet.segments));
  return ReadMessage(reader, segments, {});
}

class GpuMessageTest : public testing::Test {
 protected:
  const std::unique_ptr<DeviceMemory> gpus_ = NewGpuMemory();
};

TEST_F(GpuMessageTest, WhatIsLargeStaysOnGpus) {
  const at::Tensor matrix = at::rand({400, 400}, at::kDouble);
  struct Case {
    std::string name;
    at::Tensor on_host;
    at::Tensor sent;
    bool stays;
  };
  const at::Tensor there = matrix.to(Gpu(1));
  const at::Tensor row = at::rand({1, 2000}), small = at::rand({1024});
  const at::Tensor most = at::rand({65536}), more = at::rand({65537});
  std::vector<Case> cases = {
      {"whole", matrix, there, true},
      {"slice", matrix.slice(0, 10, 160), there.slice(0, 10, 160), true},
      {"transposed", matrix.t(), there.t(), true},
      {"expanded", row.expand({7, 2000}), row.to(Gpu(0)).expand({7, 2000}), true},
      {"half", row.to(at::kHalf), row.to(at::kHalf).to(Gpu(2)), false},
      {"larger half", matrix.to(at::kHalf), matrix.to(at::kHalf).to(Gpu(2)), true},
      {"complex", matrix.to(at::kComplexFloat), matrix.to(at::kComplexFloat).to(Gpu(2)), true},
      {"bools", matrix > 0.5, (matrix > 0.5).to(Gpu(0)), false},
      {"small", small, small.to(Gpu(2)), false},
      {"the most", most, most.to(Gpu(0)), false},
      {"more", more, more.to(Gpu(0)), true},
      {"no element", at::empty({0, 3}), at::empty({0, 3}, Gpu(1)), false},
      {"one", row[0][0], row[0][0].to(Gpu(1)), false},
      {"host", matrix, matrix, false},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    Packet packet;
    const size_t before = fake_cuda::PageableBytes();
    const absl::Status appended = AppendMessage({"x", {test.sent}}, &packet, Shifted());
    ASSERT_TRUE(appended.ok()) << appended;
    const bool stays = !packet.segments.empty() && packet.segments[0].device >= 0;
    EXPECT_EQ(stays, test.stays);
    if (stays) {
      EXPECT_EQ(packet.segments[0].device, test.sent.device().index());
      EXPECT_EQ(packet.segments[0].data, test.sent.const_data_ptr());
    }
    Packet carried = Carry(packet, *gpus_);
    const absl::StatusOr<Message> message = Read(carried);
    ASSERT_TRUE(message.ok()) << message.status();
    const bool by_cpu = test.sent.is_cuda() && test.sent.numel() > 0 && !test.stays;
    EXPECT_EQ(fake_cuda::PageableBytes() > before, by_cpu);
    const at::Tensor& arrived = message->tensors[0];
    if (test.sent.is_cpu()) {
      EXPECT_TRUE(arrived.is_cpu());
    } else {
      EXPECT_EQ(arrived.device(), Gpu((test.sent.device().index() + 1) % fake_cuda::kDevices));
    }
    EXPECT_EQ(arrived.sizes(), test.on_host.sizes());
    EXPECT_EQ(arrived.strides(), test.on_host.strides());
    // The stand-in cannot copy what repeats itself.
    const bool repeats = test.name == "expanded";
    EXPECT_TRUE(repeats ? arrived[6].cpu().equal(row[0]) : arrived.cpu().equal(test.on_host));
  }
}

// The gradient of a sum, say: by the channel or without one it goes as the one element that it is.
TEST_F(GpuMessageTest, OneElementThatIsShownOftenGoesOnce) {
  const at::Tensor one = at::rand({1});
  for (const bool carries_gpus : {true, false}) {
    for (const int64_t times : {100, 100'000}) {
      SCOPED_TRACE(absl::StrCat(carries_gpus, ", ", times));
      Packet packet;
      const absl::Status appended =
          AppendMessage({"", {one.to(Gpu(0)).expand({times})}}, &packet, Shifted(carries_gpus));
      ASSERT_TRUE(appended.ok()) << appended;
      EXPECT_TRUE(packet.segments.empty());
      EXPECT_LT(packet.bytes.size(), 100u);
      const absl::StatusOr<Message> message = Read(packet);
      ASSERT_TRUE(message.ok()) << message.status();
      const at::Tensor& arrived = message->tensors[0];
      EXPECT_EQ(arrived.device(), Gpu(1));
      EXPECT_EQ(arrived.sizes(), at::IntArrayRef({times}));
      EXPECT_EQ(arrived.strides(), at::IntArrayRef({0}));
      EXPECT_TRUE(arrived[times - 1].cpu().equal(one[0]));
    }
  }
}

// Memory of the host is for a few small ones.
TEST_F(GpuMessageTest, ManyOfMiddleSizeGoFromGpuToGpu) {
  const at::Tensor on_host = at::rand({50000});
  const std::vector<at::Tensor> tensors(20, on_host.to(Gpu(0)));
  Packet packet;
  ASSERT_TRUE(AppendMessage({"", tensors}, &packet, Shifted()).ok());
  ASSERT_EQ(packet.segments.size(), tensors.size());
  size_t by_host = 0;
  for (const Segment& segment : packet.segments) {
    if (segment.device < 0) by_host += segment.size;
  }
  EXPECT_GT(by_host, kMessageByHostBytes / 2);
  EXPECT_LE(by_host, kMessageByHostBytes);
  Packet carried = Carry(packet, *gpus_);
  const absl::StatusOr<Message> message = Read(carried);
  ASSERT_TRUE(message.ok()) << message.status();
  for (const at::Tensor& tensor : message->tensors) EXPECT_TRUE(tensor.cpu().equal(on_host));
}

// They go by way of the CPU, whatever their size.
TEST_F(GpuMessageTest, SparseTensorsOfGpusArrive) {
  const at::Tensor indices = at::arange(3).unsqueeze(0), values = at::rand({3, 2});
  const at::Tensor sparse = at::_sparse_coo_tensor_unsafe(
      indices.to(Gpu(0)), values.to(Gpu(0)), {10, 2},
      at::TensorOptions().dtype(at::kFloat).device(Gpu(0)).layout(at::kSparse));
  Packet packet;
  const absl::Status sent = AppendMessage({"", {sparse}}, &packet, Shifted());
  ASSERT_TRUE(sent.ok()) << sent;
  const absl::StatusOr<Message> arrived = Read(packet);
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  const at::Tensor& copy = arrived->tensors[0];
  ASSERT_TRUE(copy.is_sparse() && copy.is_cuda());
  EXPECT_TRUE(copy._indices().cpu().equal(indices));
  EXPECT_TRUE(copy._values().cpu().equal(values));
}

// Each wait costs more than such a tensor's copy.
TEST_F(GpuMessageTest, SmallTensorsAreWaitedForTogether) {
  Message message;
  std::vector<at::Tensor> sent;
  for (int i = 0; i < 20; ++i) {
    sent.push_back(at::rand({10 + i, 3}));
    message.tensors.push_back(sent.back().to(Gpu(i % 2)));
  }
  message.tensors.push_back(at::rand({7}));
  sent.push_back(message.tensors.back());
  Packet packet;
  size_t before = fake_cuda::Waits();
  ASSERT_TRUE(AppendMessage(message, &packet, Shifted()).ok());
  EXPECT_EQ(fake_cuda::Waits() - before, 2u) << "once for each of the two GPUs";
  before = fake_cuda::Waits();
  const absl::StatusOr<Message> arrived = Read(packet);
  ASSERT_TRUE(arrived.ok()) << arrived.status();
  EXPECT_EQ(fake_cuda::Waits() - before, 2u);
  ASSERT_EQ(arrived->tensors.size(), sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    EXPECT_EQ(arrived->tensors[i].device().type(), i < 20 ? at::kCUDA : at::kCPU);
    EXPECT_TRUE(arrived->tensors[i].cpu().equal(sent[i])) << i;
  }
}

TEST_F(GpuMessageTest, WithoutTheChannelAllGoByWayOfTheCpu) {
  const at::Tensor x = at::rand({100000}), there = x.to(Gpu(0));
  Packet packet;
  const size_t before = fake_cuda::PageableBytes();
  ASSERT_TRUE(AppendMessage({"", {there}}, &packet, Shifted(false)).ok());
  EXPECT_EQ(packet.segments.at(0).device, -1);
  EXPECT_EQ(fake_cuda::PageableBytes() - before, x.nbytes());
  const absl::StatusOr<Message> message = Read(packet);
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->tensors[0].device(), Gpu(1));
  EXPECT_TRUE(message->tensors[0].cpu().equal(x));
}

TEST_F(GpuMessageTest, TheStreamIsTheCurrentOne) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(0));
  const c10::StreamGuard guard(stream);
  Packet packet;
  ASSERT_TRUE(AppendMessage({"", {at::rand({100000}).to(Gpu(0))}}, &packet, Shifted()).ok());
  EXPECT_EQ(packet.segments.at(0).stream, stream.native_handle());
}

// The reader's stream still has to read what it has let go of, and the next thing arrives.
TEST_F(GpuMessageTest, MemoryIsNotUsedAgainBeforeTheReaderIsDone) {
  const c10::Stream readers = c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(1));
  const at::Tensor x = at::rand({1 << 20}), y = at::rand({1 << 20});
  at::Tensor read = at::empty({1 << 20}).pin_memory();
  const auto arrive = [&](const at::Tensor& tensor) {
    Packet packet;
    EXPECT_TRUE(AppendMessage({"", {tensor.to(Gpu(0))}}, &packet, Shifted()).ok());
    Packet carried = Carry(packet, *gpus_);
    const c10::StreamGuard guard(readers);
    return Read(carried).value().tensors[0];
  };
  {
    const fake_cuda::Standstill standstill(readers.native_handle());
    {
      const at::Tensor arrived = arrive(x);
      const c10::StreamGuard guard(readers);
      read.copy_(arrived, /*non_blocking=*/true);
    }
    EXPECT_TRUE(arrive(y).cpu().equal(y));
  }
  readers.synchronize();
  EXPECT_TRUE(read.equal(x));
}

TEST_F(GpuMessageTest, AfterArrivalComesWhenTheStreamHasWritten) {
  Packet packet;
  packet.segments.push_back(gpus_->Allocate(2, 1000).value());
  absl::Notification arrived;
  {
    const fake_cuda::Standstill standstill(packet.segments[0].stream);
    gpus_->AfterArrival(packet, [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      arrived.Notify();
    });
    EXPECT_FALSE(arrived.HasBeenNotified());
  }
  arrived.WaitForNotification();
}

// A thread that captures a stream as PyTorch does by default: beside it CUDA refuses every other
// thread what is not safe, and ends the capture then.
class CapturingThread {
 public:
  explicit CapturingThread(const c10::Stream& stream)
      : thread_([this, handle = stream.native_handle()] {
          const fake_cuda::Capture capture(handle);
          captures_.Notify();
          over_.WaitForNotification();
          intact_ = capture.intact();
        }) {
    captures_.WaitForNotification();
  }

  // Returns whether nothing else has ended it. To be called once.
  bool End() {
    over_.Notify();
    thread_.join();
    return intact_;
  }

 private:
  absl::Notification captures_, over_;
  bool intact_ = false;
  std::thread thread_;
};

TEST_F(GpuMessageTest, GraphsThatOtherThreadsCaptureAreLeftAlone) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(0));
  const at::Tensor small = at::rand({10}), large = at::rand({100000}), bools = large > 0.5;
  const at::Tensor middle = at::rand({5000});
  const Message message = {
      "", {small.to(Gpu(0)), large.to(Gpu(1)), bools.to(Gpu(2)), middle.to(Gpu(0))}};
  Packet packet;
  {
    CapturingThread captures(stream);
    const absl::Status sent = AppendMessage(message, &packet, Shifted());
    EXPECT_TRUE(sent.ok()) << sent;
    EXPECT_TRUE(captures.End()) << "what is sent ends it";
  }
  ASSERT_EQ(packet.segments.size(), 3u);
  {
    CapturingThread captures(stream);
    // More than the allocator keeps.
    const auto allocated = gpus_->Allocate(2, size_t{100} << 20);
    EXPECT_TRUE(allocated.ok()) << allocated.status();
    EXPECT_TRUE(captures.End()) << "memory for what arrives ends it";
  }
  Packet carried = Carry(packet, *gpus_);
  {
    CapturingThread captures(stream);
    absl::Notification arrived;
    gpus_->AfterArrival(carried, [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      arrived.Notify();
    });
    arrived.WaitForNotification();
    EXPECT_TRUE(captures.End()) << "the wait for what arrives ends it";
  }
  CapturingThread captures(stream);
  const absl::StatusOr<Message> read = Read(carried);
  EXPECT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(captures.End()) << "what is read ends it";
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(read->tensors[0].cpu().equal(small));
  EXPECT_TRUE(read->tensors[1].cpu().equal(large));
  EXPECT_TRUE(read->tensors[2].cpu().equal(bools));
  EXPECT_TRUE(read->tensors[3].cpu().equal(middle));
}

// TensorPipe ends the process where a copy that it has begun cannot be waited for.
TEST_F(GpuMessageTest, WhatIsCapturedIsNotSentAndItsGraphIsLeftAlone) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getNewStream(Gpu(0));
  const at::Tensor on_other = at::rand({100000}).to(Gpu(1));
  for (const int64_t size : {10, 5000, 100000}) {
    const Message message = {"", {at::Tensor(), on_other, at::rand({size}).to(Gpu(0))}};
    Packet packet;
    packet.bytes = "what was there";
    {
      const c10::StreamGuard guard(stream);
      const fake_cuda::Capture capture(stream.native_handle());
      const absl::Status status = AppendMessage(message, &packet, Shifted());
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "tensor 2: the current stream of cuda:0 is"))
          << status;
      EXPECT_TRUE(AppendMessage({"", {on_other}}, &packet, Shifted()).ok());
      EXPECT_TRUE(capture.intact());
    }
    EXPECT_EQ(packet.segments.size(), 1u);
    EXPECT_TRUE(AppendMessage(message, &packet, Shifted()).ok());
  }
}

TEST_F(GpuMessageTest, NoMemory) {
  const absl::Status status = gpus_->Allocate(1, fake_cuda::kDeviceBytes + 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "bytes of cuda:1")) << status;
  EXPECT_TRUE(gpus_->Allocate(1, 1000).ok());
}

// Each is a segment of a GPU where it should be none, or another one's.
TEST_F(GpuMessageTest, HostileSegments) {
  const auto refused = [&](const at::Tensor& tensor, int gpu, const DeviceMap& map) {
    Packet packet;
    EXPECT_TRUE(AppendMessage({"", {tensor}}, &packet, map).ok());
    for (Segment& segment : packet.segments) {
      segment = gpus_->Allocate(gpu, segment.size).value();
    }
    const absl::Status status = Read(packet).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "its segment is on cuda:")) << status;
  };
  const at::Tensor x = at::rand({100000});
  refused(x, 0, Shifted());                     // belongs on the CPU
  refused(x.to(Gpu(0)), 0, Shifted());          // belongs on GPU 1
  refused((x > 0.5).to(Gpu(0)), 1, Shifted());  // bools have to be looked at
  refused(at::sparse_coo_tensor(at::arange(100000).unsqueeze(0), x, {100000}), 1, Shifted());
  // The wrong size.
  Packet packet;
  ASSERT_TRUE(AppendMessage({"", {x.to(Gpu(0))}}, &packet, Shifted()).ok());
  packet.segments[0] = gpus_->Allocate(1, 5000).value();
  const absl::Status status = Read(packet).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "needs 400000 bytes")) << status;
}

}  // namespace
}  // namespace distgrad
