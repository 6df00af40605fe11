// Packets as TensorPipe's messages and back, their limits, and messages that lie.
#include "core/transport/tensorpipe/message_layout.h"

#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/wire.h"
#include "core/transport/tensorpipe/socket/peer_process.h"
#include "gtest/gtest.h"
#include "tensorpipe/common/cpu_buffer.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using tensorpipe::Descriptor;
using tensorpipe::Device;

constexpr PacketLimits kLimits = {uint64_t{1} << 20, 8};

Segment Filled(size_t size, uint8_t value) {
  Segment segment = AllocateSegment(size);
  std::memset(segment.data, value, size);
  return segment;
}

// What the other end is told of a message.
Descriptor DescriptorOf(const tensorpipe::Message& message) {
  Descriptor descriptor;
  descriptor.metadata = message.metadata;
  for (const auto& payload : message.payloads) {
    descriptor.payloads.push_back({payload.length, payload.metadata});
  }
  for (const auto& tensor : message.tensors) {
    Descriptor::Tensor announced;
    announced.length = tensor.length;
    announced.sourceDevice = tensor.buffer.device();
    announced.targetDevice = tensor.targetDevice;
    descriptor.tensors.push_back(announced);
  }
  return descriptor;
}

// A packet after LayOut, Prepare and a copy in TensorPipe's place.
Packet Carry(Packet packet) {
  tensorpipe::Message message = LayOut(packet);
  auto incoming = Prepare(DescriptorOf(message), {uint64_t{1} << 30, 100});
  EXPECT_TRUE(incoming.ok()) << incoming.status();
  if (!incoming.ok()) return {};
  auto& allocation = (*incoming)->allocation;
  EXPECT_EQ(allocation.payloads.size(), message.payloads.size());
  EXPECT_EQ(allocation.tensors.size(), message.tensors.size());
  for (size_t i = 0; i < message.payloads.size(); ++i) {
    std::memcpy(allocation.payloads[i].data, message.payloads[i].data, message.payloads[i].length);
  }
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    std::memcpy(allocation.tensors[i].buffer.unwrap<tensorpipe::CpuBuffer>().ptr,
                message.tensors[i].buffer.unwrap<tensorpipe::CpuBuffer>().ptr,
                message.tensors[i].length);
  }
  return std::move((*incoming)->packet);
}

TEST(MessageLayoutTest, SmallPacketIsMetadataAlone) {
  Packet packet;
  packet.bytes = std::string(kMetadataBytes, 'x');
  const tensorpipe::Message message = LayOut(packet);
  EXPECT_EQ(message.metadata, std::string(kMetadataBytes, 'x'));
  EXPECT_TRUE(message.payloads.empty());
  EXPECT_TRUE(message.tensors.empty());
}

TEST(MessageLayoutTest, EverySizeArrivesInOrder) {
  for (size_t bytes : {size_t{0}, size_t{1}, kMetadataBytes, kMetadataBytes + 1}) {
    const std::vector<size_t> sizes = {kChannelBytes + 1, 1, kChannelBytes, 200000, 300,
                                       kChannelBytes + 2};
    for (size_t count = 0; count <= sizes.size(); ++count) {
      Packet packet;
      packet.bytes = std::string(bytes, 'b');
      for (size_t i = 0; i < count; ++i) packet.segments.push_back(Filled(sizes[i], 'a' + i));
      const Packet carried = Carry(std::move(packet));
      EXPECT_EQ(carried.bytes, std::string(bytes, 'b'));
      ASSERT_EQ(carried.segments.size(), count);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(carried.segments[i].size, sizes[i]);
        EXPECT_EQ(carried.segments[i].data[0], 'a' + i);
        EXPECT_EQ(carried.segments[i].data[sizes[i] - 1], 'a' + i);
      }
    }
  }
}

TEST(MessageLayoutTest, PacketsBeyondALimit) {
  Packet packet;
  packet.segments.push_back(Filled(100, 1));
  packet.bytes = "four";
  EXPECT_TRUE(CheckPacket(packet, {104, 1}).ok());
  EXPECT_EQ(CheckPacket(packet, {103, 1}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CheckPacket(packet, {3, 1}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CheckPacket(packet, {104, 0}).code(), absl::StatusCode::kResourceExhausted);
  packet.segments.emplace_back();
  EXPECT_EQ(CheckPacket(packet, {104, 2}).code(), absl::StatusCode::kInvalidArgument);
}

// --- descriptors that a hostile peer might send

std::string Position(uint32_t position) {
  std::string bytes;
  WireWriter(&bytes).U32(position);
  return bytes;
}

Descriptor::Tensor Tensor(size_t length) {
  Descriptor::Tensor tensor;
  tensor.length = length;
  tensor.sourceDevice = Device(tensorpipe::kCpuDeviceType, 0);
  return tensor;
}

absl::StatusCode CodeOf(Descriptor descriptor) {
  return Prepare(std::move(descriptor), kLimits).status().code();
}

TEST(HostileDescriptorTest, SizesBeyondTheLimit) {
  constexpr size_t kMax = std::numeric_limits<size_t>::max();
  for (size_t size : {size_t{(1 << 20) + 1}, size_t{1} << 60, kMax}) {
    Descriptor tensor;
    tensor.tensors = {Tensor(size)};
    EXPECT_EQ(CodeOf(tensor), absl::StatusCode::kInvalidArgument);
    Descriptor payload;
    payload.payloads = {{size, Position(0)}};
    EXPECT_EQ(CodeOf(payload), absl::StatusCode::kInvalidArgument);
    payload.payloads = {{size, Position(kBytesPosition)}};
    EXPECT_EQ(CodeOf(payload), absl::StatusCode::kInvalidArgument);
  }
  Descriptor metadata;
  metadata.metadata = std::string((1 << 20) + 1, 'x');
  EXPECT_EQ(CodeOf(metadata), absl::StatusCode::kInvalidArgument);
  // Together only; and a sum that wraps around.
  Descriptor sum;
  sum.tensors = {Tensor(1 << 19), Tensor(1 << 19)};
  EXPECT_EQ(CodeOf(sum), absl::StatusCode::kOk);
  sum.metadata = "x";
  EXPECT_EQ(CodeOf(sum), absl::StatusCode::kInvalidArgument);
  sum.tensors = {Tensor(100), Tensor(kMax)};
  EXPECT_EQ(CodeOf(sum), absl::StatusCode::kInvalidArgument);
}

// The frame in its bytes says who waits for it.
TEST(HostileDescriptorTest, SegmentsBeyondTheLimitAreLostAlone) {
  PacketLimits limits = kLimits;
  limits.can_discard = true;
  Descriptor descriptor;
  descriptor.tensors = {Tensor(1 << 20)};
  descriptor.payloads = {{5, Position(1)}};
  descriptor.metadata = "bytes";
  const auto incoming = Prepare(descriptor, limits);
  ASSERT_TRUE(incoming.ok()) << incoming.status();
  const Packet& packet = (*incoming)->packet;
  EXPECT_EQ(packet.segments_status,
            absl::ResourceExhaustedError(
                "the message has 1048586 bytes; limit message_bytes is 1048576"));
  EXPECT_TRUE(packet.segments.empty());
  EXPECT_EQ(packet.bytes, "bytes");
  const tensorpipe::Allocation& allocation = (*incoming)->allocation;
  ASSERT_EQ(allocation.tensors.size(), 1u);
  EXPECT_EQ(tensorpipe::Buffer(allocation.tensors[0].buffer).unwrap<tensorpipe::CpuBuffer>().ptr,
            DiscardTarget());
  ASSERT_EQ(allocation.payloads.size(), 1u);
  EXPECT_EQ(allocation.payloads[0].data, DiscardTarget());
}

TEST(HostileDescriptorTest, OfBytesBeyondTheLimitThereIsOnlyWhy) {
  PacketLimits limits = kLimits;
  limits.can_discard = true;
  Descriptor descriptor;
  descriptor.payloads = {{(1 << 20) + 1, Position(kBytesPosition)}, {5, Position(0)}};
  const auto incoming = Prepare(descriptor, limits);
  ASSERT_TRUE(incoming.ok()) << incoming.status();
  const Packet& packet = (*incoming)->packet;
  EXPECT_EQ(packet.segments_status,
            absl::ResourceExhaustedError(
                "the message has 1048582 bytes; limit message_bytes is 1048576"));
  EXPECT_TRUE(packet.segments.empty());
  EXPECT_TRUE(packet.bytes.empty());
  for (const auto& payload : (*incoming)->allocation.payloads) {
    EXPECT_EQ(payload.data, DiscardTarget());
  }
}

// A string of more than its max_size() throws something else than std::bad_alloc.
TEST(HostileDescriptorTest, BytesBeyondAllMemoryWithoutALimit) {
  PacketLimits limits = {std::numeric_limits<uint64_t>::max(), 8};
  for (const size_t size :
       {std::string().max_size() + 1, size_t{1} << 63, std::numeric_limits<size_t>::max()}) {
    Descriptor descriptor;
    descriptor.payloads = {{size, Position(kBytesPosition)}};
    limits.can_discard = false;
    EXPECT_EQ(Prepare(descriptor, limits).status().code(), absl::StatusCode::kInvalidArgument);
    limits.can_discard = true;
    const auto incoming = Prepare(descriptor, limits);
    ASSERT_TRUE(incoming.ok()) << incoming.status();
    EXPECT_EQ((*incoming)->packet.segments_status.code(), absl::StatusCode::kResourceExhausted);
  }
}

// More than any machine has, within the limit.
TEST(NoMemoryTest, APacketComesWithoutItsSegments) {
  constexpr size_t kTooMuch = size_t{1} << 61;
  PacketLimits limits = {std::numeric_limits<uint64_t>::max() / 2, 8};
  Descriptor descriptor;
  descriptor.tensors = {Tensor(kTooMuch)};
  descriptor.payloads = {{5, Position(1)}, {3, Position(kBytesPosition)}};
  EXPECT_EQ(Prepare(descriptor, limits).status().code(), absl::StatusCode::kResourceExhausted);
  limits.can_discard = true;
  const auto incoming = Prepare(descriptor, limits);
  ASSERT_TRUE(incoming.ok()) << incoming.status();
  const Packet& packet = (*incoming)->packet;
  EXPECT_EQ(packet.segments_status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(packet.segments.empty());
  EXPECT_EQ(packet.bytes.size(), 3u);
  const tensorpipe::Allocation& allocation = (*incoming)->allocation;
  ASSERT_EQ(allocation.tensors.size(), 1u);
  EXPECT_EQ(tensorpipe::Buffer(allocation.tensors[0].buffer).unwrap<tensorpipe::CpuBuffer>().ptr,
            DiscardTarget());
  ASSERT_EQ(allocation.payloads.size(), 2u);
  EXPECT_EQ(allocation.payloads[0].data, DiscardTarget());
  EXPECT_EQ(allocation.payloads[1].data, packet.bytes.data());
}

// Of such a packet nothing can be told, not even that it came without something.
TEST(NoMemoryTest, APacketDoesNotComeWithoutItsBytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer ends the process where operator new finds no memory";
#endif
  constexpr size_t kTooMuch = size_t{1} << 61;
  PacketLimits limits = {std::numeric_limits<uint64_t>::max() / 2, 8};
  limits.can_discard = true;
  Descriptor descriptor;
  descriptor.tensors = {Tensor(kTooMuch)};
  descriptor.payloads = {{5, Position(1)}, {kTooMuch, Position(kBytesPosition)}};
  EXPECT_EQ(Prepare(descriptor, limits).status().code(), absl::StatusCode::kResourceExhausted);
}

// Whichever allocation fails: a packet has its bytes, or does not come.
TEST(NoMemoryTest, NoPacketComesWithoutTheBytesOfItsMessage) {
  PacketLimits limits = kLimits;
  limits.can_discard = true;
  const std::string bytes(100, 'x');
  bool failed = true;
  int without_segments = 0;
  for (int nth = 0; failed; ++nth) {
    SCOPED_TRACE(nth);
    Descriptor descriptor;
    descriptor.metadata = bytes;
    descriptor.payloads = {{5, Position(0)}};
    FailAllocation(nth);
    const auto incoming = Prepare(std::move(descriptor), limits);
    failed = FailAllocation(-1);
    if (!incoming.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(incoming.status())) << incoming.status();
      continue;
    }
    EXPECT_EQ((*incoming)->packet.bytes, bytes);
    without_segments += (*incoming)->packet.segments.empty();
  }
  EXPECT_GT(without_segments, 0);
}

TEST(HostileDescriptorTest, TooManySegments) {
  Descriptor descriptor;
  for (uint32_t i = 0; i < 4; ++i) descriptor.payloads.push_back({1, Position(i)});
  descriptor.payloads.push_back({1, Position(kBytesPosition)});
  descriptor.tensors.assign(4, Tensor(1));
  EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kOk);
  descriptor.tensors.push_back(Tensor(1));
  PacketLimits limits = kLimits;
  limits.can_discard = true;
  const auto incoming = Prepare(descriptor, limits);
  ASSERT_TRUE(incoming.ok()) << incoming.status();
  EXPECT_EQ((*incoming)->packet.segments_status,
            absl::ResourceExhaustedError("the message has 9 pieces of memory; limit "
                                         "tensors_per_message allows 8"));
  // To read so many to their end would take much more memory than they did so far.
  descriptor.tensors.assign((1 << 16) + 1, Tensor(1));
  EXPECT_EQ(Prepare(descriptor, limits).status().code(), absl::StatusCode::kInvalidArgument);
  descriptor.tensors.assign(9, Tensor(1));
  EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kInvalidArgument);
}

TEST(HostileDescriptorTest, Malformed) {
  const std::vector<std::vector<Descriptor::Payload>> payloads = {
      {{0, Position(0)}},                    // empty
      {{1, ""}},                             // no position
      {{1, "abc"}},                          // a short one
      {{1, Position(0) + "x"}},              // a long one
      {{1, Position(1)}},                    // beyond the last
      {{1, Position(kBytesPosition - 1)}},   // far beyond
      {{1, Position(0)}, {1, Position(0)}},  // twice the same
      {{1, Position(kBytesPosition)}, {1, Position(kBytesPosition)}},
  };
  for (size_t i = 0; i < payloads.size(); ++i) {
    Descriptor descriptor;
    descriptor.payloads = payloads[i];
    EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kInvalidArgument) << i;
  }
  Descriptor twice;
  twice.metadata = "x";
  twice.payloads = {{1, Position(kBytesPosition)}};
  EXPECT_EQ(CodeOf(twice), absl::StatusCode::kInvalidArgument);
}

TEST(HostileDescriptorTest, Tensors) {
  Descriptor descriptor;
  descriptor.tensors = {Tensor(0)};
  EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kInvalidArgument);
  descriptor.tensors = {Tensor(1)};
  descriptor.tensors[0].sourceDevice = Device(tensorpipe::kCudaDeviceType, 0);
  EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kInvalidArgument);
  descriptor.tensors = {Tensor(1)};
  descriptor.tensors[0].targetDevice = Device(tensorpipe::kCpuDeviceType, 1);
  EXPECT_EQ(CodeOf(descriptor), absl::StatusCode::kInvalidArgument);
}

// TensorPipe would end the process for each of these.
TEST(HostileDescriptorTest, GpusWithoutAChannel) {
  PacketLimits limits = kLimits;
  limits.gpus_here = 2;
  limits.gpus_there = 3;
  const auto gpu = [](int index) { return Device(tensorpipe::kCudaDeviceType, index); };
  const Device cpu(tensorpipe::kCpuDeviceType, 0);
  for (const auto& [from, to] : std::vector<std::pair<Device, Device>>{{gpu(0), cpu},
                                                                       {cpu, gpu(0)},
                                                                       {gpu(3), gpu(0)},
                                                                       {gpu(-1), gpu(0)},
                                                                       {gpu(0), gpu(2)},
                                                                       {gpu(0), gpu(-1)},
                                                                       {gpu(0), Device("tpu", 0)},
                                                                       {Device("tpu", 0), cpu}}) {
    Descriptor descriptor;
    descriptor.tensors = {Tensor(1)};
    descriptor.tensors[0].sourceDevice = from;
    descriptor.tensors[0].targetDevice = to;
    const absl::Status status = Prepare(descriptor, limits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(to.toString()), std::string::npos) << status;
  }
}

TEST(CheckPacketTest, GpusWithoutAChannel) {
  PacketLimits limits = kLimits;
  limits.gpus_here = 2;
  limits.gpus_there = 3;
  Packet packet;
  packet.segments = {Filled(1, 'x')};
  Segment& segment = packet.segments[0];
  for (const auto& [device, target, fits] : std::vector<std::tuple<int, int, bool>>{
           {1, 2, true}, {2, 0, false}, {0, 3, false}, {0, -1, false}}) {
    segment.device = device;
    segment.target = target;
    const absl::Status status = CheckPacket(packet, limits);
    EXPECT_EQ(status.code(), fits ? absl::StatusCode::kOk : absl::StatusCode::kFailedPrecondition)
        << status;
  }
}

}  // namespace
}  // namespace distgrad
