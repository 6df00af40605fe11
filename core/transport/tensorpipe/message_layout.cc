// Converts between packets and TensorPipe's messages, and checks what has arrived.
#include "core/transport/tensorpipe/message_layout.h"

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/transport/tensorpipe/gpu_channel.h"
#include "core/transport/tensorpipe/socket/peer_process.h"
#include "tensorpipe/common/cpu_buffer.h"
#include "tensorpipe/common/device.h"

namespace distgrad {
namespace {

// So many segments at most are read only to be dropped, as TensorPipe takes memory for each: those
// of a worker that has the default limits.
constexpr size_t kMostDiscarded = 1 << 16;

// Adds up the sizes of a packet. Its errors have the names of the limits of a worker, which gives
// them to its transport.
class Budget {
 public:
  explicit Budget(const PacketLimits& limits)
      : segments_(limits.segments),
        // For more than this a string does not even ask for memory, but throws std::length_error.
        bytes_(std::min<uint64_t>(limits.bytes, std::string().max_size())) {}

  void Spend(uint64_t size) {
    spent_ += std::min(size, std::numeric_limits<uint64_t>::max() - spent_);
  }
  uint64_t spent() const { return spent_; }
  uint64_t bytes() const { return bytes_; }
  // Of all that was spent, and so many segments.
  absl::Status Check(size_t segments) const {
    if (segments > segments_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the message has ", segments,
                       " pieces of memory; limit tensors_per_message allows ", segments_));
    }
    if (spent_ > bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the message has ", spent_, " bytes; limit message_bytes is ", bytes_));
    }
    return absl::OkStatus();
  }

 private:
  const size_t segments_;
  const uint64_t bytes_;
  uint64_t spent_ = 0;
};

tensorpipe::Device Cpu() { return {tensorpipe::kCpuDeviceType, 0}; }
tensorpipe::Device Gpu(int index) { return {tensorpipe::kCudaDeviceType, index}; }

bool IsOneOf(const tensorpipe::Device& device, int gpus) {
  return device.type == tensorpipe::kCudaDeviceType && device.index >= 0 && device.index < gpus;
}

tensorpipe::Message::Payload MakePayload(void* data, size_t size, uint32_t position) {
  tensorpipe::Message::Payload payload;
  payload.data = data;
  payload.length = size;
  WireWriter(&payload.metadata).U32(position);
  return payload;
}

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed message: ", what));
}

// Made before main(), for later there may be no memory for it.
const absl::Status* const kNoMemory =
    new absl::Status(absl::ResourceExhaustedError("there is no memory for it"));

// Takes of a packet only its bytes; and not these, either, if they alone are beyond the limit.
absl::StatusOr<std::shared_ptr<Incoming>> Discard(tensorpipe::Descriptor descriptor,
                                                  const std::vector<uint32_t>& positions,
                                                  uint64_t limit, const absl::Status& why) try {
  auto incoming = std::make_shared<Incoming>();
  incoming->packet.segments_status = why;
  if (descriptor.metadata.size() <= limit) incoming->packet.bytes = std::move(descriptor.metadata);
  for (const auto& tensor : descriptor.tensors) {
    if (!(tensor.sourceDevice == Cpu())) return why;
    incoming->allocation.tensors.push_back({tensorpipe::CpuBuffer{DiscardTarget()}});
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    void* data = DiscardTarget();
    if (positions[i] == kBytesPosition && descriptor.payloads[i].length <= limit) {
      incoming->packet.bytes.resize(descriptor.payloads[i].length);
      data = incoming->packet.bytes.data();
    }
    incoming->allocation.payloads.push_back({data});
  }
  return incoming;
} catch (const std::bad_alloc&) {
  return why;
}

}  // namespace

absl::Status CheckPacket(const Packet& packet, const PacketLimits& limits) {
  Budget budget(limits);
  budget.Spend(packet.bytes.size());
  for (const Segment& segment : packet.segments) budget.Spend(segment.size);
  DG_RETURN_IF_ERROR(budget.Check(packet.segments.size()));
  for (const Segment& segment : packet.segments) {
    if (segment.size == 0) return absl::InvalidArgumentError("a packet with an empty segment");
    if (segment.device < 0) continue;
    if (segment.device >= limits.gpus_here || segment.target < 0 ||
        segment.target >= limits.gpus_there) {
      return absl::FailedPreconditionError(
          absl::StrCat("memory of cuda:", segment.device, " for its cuda:", segment.target,
                       "; of this end's GPUs ", limits.gpus_here,
                       " have a channel, of the other's ", limits.gpus_there));
    }
  }
  return absl::OkStatus();
}

tensorpipe::Message LayOut(Packet& packet) {
  tensorpipe::Message message;
  if (packet.bytes.size() <= kMetadataBytes) {
    message.metadata = std::move(packet.bytes);
  } else {
    message.payloads.push_back(
        MakePayload(packet.bytes.data(), packet.bytes.size(), kBytesPosition));
  }
  for (size_t i = 0; i < packet.segments.size(); ++i) {
    const Segment& segment = packet.segments[i];
    const bool on_gpu = segment.device >= 0;
    if (!on_gpu && segment.size <= kChannelBytes) {
      message.payloads.push_back(MakePayload(segment.data, segment.size, static_cast<uint32_t>(i)));
      continue;
    }
    tensorpipe::Message::Tensor tensor;
    tensor.buffer = on_gpu ? GpuBuffer(segment) : tensorpipe::CpuBuffer{segment.data};
    tensor.length = segment.size;
    tensor.targetDevice = on_gpu ? Gpu(segment.target) : Cpu();
    message.tensors.push_back(std::move(tensor));
  }
  return message;
}

bool TakesLongToPrepare(const tensorpipe::Descriptor& descriptor) {
  constexpr uint64_t kLongBytes = 2 << 20;
  constexpr size_t kManySegments = 1024;
  if (descriptor.payloads.size() + descriptor.tensors.size() > kManySegments) return true;
  for (const auto& payload : descriptor.payloads) {
    if (payload.length <= kLongBytes) continue;
    WireReader reader(payload.metadata);
    if (reader.U32() == kBytesPosition) return true;
  }
  return false;
}

absl::StatusOr<std::shared_ptr<Incoming>> Prepare(tensorpipe::Descriptor descriptor,
                                                  const PacketLimits& limits,
                                                  DeviceMemory* gpus) try {
  Budget budget(limits);
  budget.Spend(descriptor.metadata.size());

  bool bytes_apart = false;
  std::vector<uint32_t> positions;  // of the payloads
  positions.reserve(descriptor.payloads.size());
  for (const auto& payload : descriptor.payloads) {
    WireReader reader(payload.metadata);
    positions.push_back(reader.U32());
    if (!reader.ok() || reader.remaining() > 0) return Malformed("a payload of no known place");
    if (payload.length == 0) return Malformed("an empty payload");
    budget.Spend(payload.length);
    if (positions.back() != kBytesPosition) continue;
    if (bytes_apart) return Malformed("bytes that come twice");
    bytes_apart = true;
  }
  if (bytes_apart && !descriptor.metadata.empty()) return Malformed("bytes that come twice");
  bool for_gpus = false;
  for (const auto& tensor : descriptor.tensors) {
    // TensorPipe ends the process when it is asked for a device that it has no channel for.
    const tensorpipe::Device& from = tensor.sourceDevice;
    const tensorpipe::Device to = tensor.targetDevice.value_or(Cpu());
    if (!(from == Cpu() && to == Cpu()) &&
        !(IsOneOf(from, limits.gpus_there) && IsOneOf(to, limits.gpus_here))) {
      return Malformed(absl::StrCat("memory of its ", from.toString(), " for our ", to.toString(),
                                    ", between which there is no channel"));
    }
    for_gpus = for_gpus || !(from == Cpu());
    if (tensor.length == 0) return Malformed("an empty tensor");
    budget.Spend(tensor.length);
  }
  const size_t count = descriptor.payloads.size() - bytes_apart + descriptor.tensors.size();

  // The size of each segment; 0 where a tensor is to come.
  std::vector<uint64_t> sizes(count, 0);
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] == kBytesPosition) continue;
    if (positions[i] >= count || sizes[positions[i]] != 0) {
      return Malformed("a payload of no known place");
    }
    sizes[positions[i]] = descriptor.payloads[i].length;
  }
  if (absl::Status beyond = budget.Check(count); !beyond.ok()) {
    if (limits.can_discard && !for_gpus && count <= std::max(limits.segments, kMostDiscarded)) {
      return Discard(std::move(descriptor), positions, budget.bytes(), beyond);
    }
    return absl::InvalidArgumentError(beyond.message());
  }

  try {
    auto incoming = std::make_shared<Incoming>();
    Packet& packet = incoming->packet;
    packet.segments.reserve(count);
    size_t next_tensor = 0;
    for (uint64_t size : sizes) {
      if (size != 0) {
        packet.segments.push_back(AllocateSegment(size));
        continue;
      }
      const auto& tensor = descriptor.tensors[next_tensor++];
      tensorpipe::Allocation::Tensor target;
      if (tensor.sourceDevice == Cpu()) {
        packet.segments.push_back(AllocateSegment(tensor.length));
        target.buffer = tensorpipe::CpuBuffer{packet.segments.back().data};
      } else {
        DG_ASSIGN_OR_RETURN(Segment segment,
                            gpus->Allocate(tensor.targetDevice->index, tensor.length));
        target.buffer = GpuBuffer(segment);
        packet.segments.push_back(std::move(segment));
        incoming->on_gpus = true;
      }
      incoming->allocation.tensors.push_back(target);
    }
    for (size_t i = 0; i < positions.size(); ++i) {
      tensorpipe::Allocation::Payload target;
      if (positions[i] == kBytesPosition) {
        packet.bytes.resize(descriptor.payloads[i].length);
        target.data = packet.bytes.data();
      } else {
        target.data = packet.segments[positions[i]].data;
      }
      incoming->allocation.payloads.push_back(target);
    }
    // Last: where there is no memory for the rest Discard() needs them.
    if (!bytes_apart) packet.bytes = std::move(descriptor.metadata);
    return incoming;
  } catch (const std::bad_alloc&) {
    const absl::Status lost = absl::ResourceExhaustedError(
        absl::StrCat("there is no memory for the ", budget.spent(), " bytes of it"));
    if (!limits.can_discard) return lost;
    return Discard(std::move(descriptor), positions, budget.bytes(), lost);
  }
} catch (const std::bad_alloc&) {
  return *kNoMemory;
}

}  // namespace distgrad
