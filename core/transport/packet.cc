// Allocates the bytes of packets from a cache of the process.
#include "core/transport/packet.h"

#include <cstring>

#include "core/transport/block_cache.h"

namespace distgrad {
namespace {

constexpr size_t kKeptBytes = size_t{256} << 20;

// Of the process, because memory is; never destroyed, because segments may live longer than
// anything else.
BlockCache& Cache() {
  static BlockCache* const cache = new BlockCache(kKeptBytes);
  return *cache;
}

}  // namespace

Segment AllocateSegment(size_t size) {
  if (size == 0) return {};
  void* memory = Cache().Allocate(size);
  std::shared_ptr<void> owner(memory, [size](void* block) { Cache().Free(block, size); });
  return {std::move(owner), static_cast<uint8_t*>(memory), size};
}

size_t KeptSegmentBytes() { return Cache().kept(); }

Packet CopyPacket(const Packet& packet) {
  Packet copy;
  copy.bytes = packet.bytes;
  copy.segments.reserve(packet.segments.size());
  for (const Segment& segment : packet.segments) {
    copy.segments.push_back(AllocateSegment(segment.size));
    if (segment.size > 0) std::memcpy(copy.segments.back().data, segment.data, segment.size);
  }
  return copy;
}

}  // namespace distgrad
