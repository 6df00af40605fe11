// Packets as inputs of a fuzzer: how many segments, the size of each (16 bits), and the bytes.
#ifndef DISTGRAD_TESTS_FUZZ_PACKET_H_
#define DISTGRAD_TESTS_FUZZ_PACKET_H_

#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "core/base/wire.h"
#include "core/transport/packet.h"

namespace distgrad {

inline Packet PacketFromInput(absl::string_view input) {
  WireReader reader(input);
  Packet packet;
  for (int left = reader.U8() % 8; left > 0; --left) {
    const size_t size = reader.U16();
    if (size == 0) continue;  // no transport delivers one
    packet.segments.push_back(AllocateSegment(size));
    std::memset(packet.segments.back().data, 0x3f, size);
  }
  packet.bytes = std::string(reader.Rest());
  return packet;
}

inline std::string InputFromPacket(const Packet& packet) {
  std::string input;
  WireWriter writer(&input);
  writer.U8(static_cast<uint8_t>(packet.segments.size()));
  for (const Segment& segment : packet.segments) writer.U16(static_cast<uint16_t>(segment.size));
  writer.Raw(packet.bytes.data(), packet.bytes.size());
  return input;
}

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_FUZZ_PACKET_H_
