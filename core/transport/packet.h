// The packets that a transport carries: some bytes, and memory that is too large to be copied into
// them.
#ifndef DISTGRAD_CORE_TRANSPORT_PACKET_H_
#define DISTGRAD_CORE_TRANSPORT_PACKET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace distgrad {

// A range of memory and the owner that keeps it alive. On the sending side the bytes must not
// change until the send is done; on the receiving side the receiver alone owns them.
struct Segment {
  std::shared_ptr<void> owner;
  uint8_t* data = nullptr;
  size_t size = 0;  // bytes; never 0 in a packet

  // The number of the accelerator whose memory it is, where the transport carries such memory
  // (Transport::CarriesDevices); -1: the host's.
  int device = -1;
  // The number of the receiver's accelerator that it goes to, on the sending side.
  int target = -1;
  // The stream in whose order the bytes are ready to be sent, or are written as they arrive. What a
  // Receiver gets has arrived.
  void* stream = nullptr;
};

struct Packet {
  std::string bytes;
  std::vector<Segment> segments;

  // The status of the segments on the receiving side: kResourceExhausted where there was no memory
  // for them. They are lost, and not there.
  absl::Status segments_status = {};

  // Returns the size of both together.
  uint64_t size() const {
    uint64_t size = bytes.size();
    for (const Segment& segment : segments) size += segment.size;
    return size;
  }
};

// Returns a segment of `size` bytes of its own, aligned to 64 bytes, not cleared; an empty one for
// 0. Freed memory of large segments is kept for the next one, 256 MiB of it at most. Throws
// std::bad_alloc when there is no memory: check a size that a peer sent before.
Segment AllocateSegment(size_t size);

// Returns the bytes of such memory that the process keeps now, without need of them.
size_t KeptSegmentBytes();

// Returns a packet that shares no memory with `packet`.
Packet CopyPacket(const Packet& packet);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_PACKET_H_
