// How a packet lies in a TensorPipe message.
//
// The bytes are the message's metadata, which TensorPipe sends in the message's own header, in
// one write; past kMetadataBytes they are a payload. A segment is a payload too, or past
// kChannelBytes a tensor, which goes through the channel. The metadata of a payload is its
// position among the segments, in four bytes (kBytesPosition for the bytes); tensors fill the
// remaining positions in order. A segment of a GPU is a tensor of any size.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_MESSAGE_LAYOUT_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_MESSAGE_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/transport/device_memory.h"
#include "core/transport/packet.h"
#include "tensorpipe/core/message.h"

namespace distgrad {

// Measured with transport_benchmark; see its header.
inline constexpr size_t kMetadataBytes = 32 << 10;
inline constexpr size_t kChannelBytes = 256 << 10;

inline constexpr uint32_t kBytesPosition = 0xffffffff;

struct PacketLimits {
  uint64_t bytes;  // the packet's bytes and its segments together
  size_t segments;
  // How many GPUs have a channel, of this end's and of the other's. TensorPipe ends the process
  // when it is asked for one between any others.
  int gpus_here = 0;
  int gpus_there = 0;
  // Whether the connection reads to DiscardTarget().
  bool can_discard = false;
};

// kResourceExhausted if the packet is beyond a limit, kInvalidArgument if a segment is empty,
// kFailedPrecondition if one is of, or for, a GPU without a channel.
absl::Status CheckPacket(const Packet& packet, const PacketLimits& limits);

// The message of a packet that was checked. It points into the packet, whose inline bytes are
// moved out.
tensorpipe::Message LayOut(Packet& packet);

// A packet of the shape that a descriptor announces, and its memory as TensorPipe wants to
// have it told. Not to be moved: short bytes lie within the packet itself.
struct Incoming {
  Packet packet;
  tensorpipe::Allocation allocation;
  bool on_gpus = false;  // a part of it
};

// Whether Prepare() may take longer than the thread of the sockets is to be kept: bytes that come
// as a payload are cleared first, however many there are, and each segment is allocated.
bool TakesLongToPrepare(const tensorpipe::Descriptor& descriptor);

// Checks all that a descriptor says before any memory is allocated for it. kResourceExhausted
// if there is no memory, kInvalidArgument if it is beyond a limit or no LayOut made it. `gpus` is
// asked for memory only if the limits have gpus_here.
//
// With limits.can_discard, where there is no memory for the segments, or they are beyond a limit,
// the packet comes without them (Packet::segments_status); and without its bytes if these alone are
// beyond it. That goes for the host's memory, where no segment is of a GPU, and not for more
// segments than 65536 and than the limit.
absl::StatusOr<std::shared_ptr<Incoming>> Prepare(tensorpipe::Descriptor descriptor,
                                                  const PacketLimits& limits,
                                                  DeviceMemory* gpus = nullptr);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_MESSAGE_LAYOUT_H_
