// Memory for segments: its sizes, its reuse, and what is kept of it.
#include "core/transport/packet.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "core/transport/block_cache.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

constexpr size_t kKiB = 1 << 10;

TEST(BlockCacheTest, RoundsUpByAQuarterAtMost) {
  EXPECT_EQ(BlockCache::Rounded(1), 64u);
  EXPECT_EQ(BlockCache::Rounded(64), 64u);
  EXPECT_EQ(BlockCache::Rounded(65), 128u);
  for (size_t size = 64 * kKiB; size < (size_t{1} << 40); size += size / 7) {
    const size_t rounded = BlockCache::Rounded(size);
    EXPECT_GE(rounded, size);
    EXPECT_LE(rounded, size + size / 4);
    EXPECT_EQ(BlockCache::Rounded(rounded), rounded) << "a class is its own size";
  }
}

TEST(BlockCacheTest, AHugeSizeIsRefused) {
  BlockCache cache(1000 * kKiB);
  EXPECT_THROW(cache.Allocate(SIZE_MAX), std::bad_alloc);
  EXPECT_THROW(cache.Allocate(SIZE_MAX / 2 + 1), std::bad_alloc);
}

TEST(BlockCacheTest, GivesTheNewestBlockOfTheClassAgain) {
  BlockCache cache(1000 * kKiB);
  void* a = cache.Allocate(100 * kKiB);
  void* b = cache.Allocate(100 * kKiB);
  void* large = cache.Allocate(200 * kKiB);
  cache.Free(a, 100 * kKiB);
  cache.Free(b, 100 * kKiB);
  cache.Free(large, 200 * kKiB);
  EXPECT_EQ(cache.kept(), 2 * BlockCache::Rounded(100 * kKiB) + BlockCache::Rounded(200 * kKiB));
  EXPECT_EQ(cache.Allocate(100 * kKiB - 1), b);
  EXPECT_EQ(cache.Allocate(100 * kKiB), a);
  EXPECT_EQ(cache.kept(), BlockCache::Rounded(200 * kKiB));
  cache.Free(a, 100 * kKiB);
  cache.Free(b, 100 * kKiB - 1);
}

TEST(BlockCacheTest, SmallBlocksAreNotKept) {
  BlockCache cache(1000 * kKiB);
  cache.Free(cache.Allocate(1), 1);
  cache.Free(cache.Allocate(64 * kKiB - 64), 64 * kKiB - 64);
  EXPECT_EQ(cache.kept(), 0u);
  cache.Free(cache.Allocate(64 * kKiB), 64 * kKiB);
  EXPECT_EQ(cache.kept(), 64 * kKiB);
}

TEST(BlockCacheTest, PastTheLimitTheOldestGo) {
  BlockCache cache(256 * kKiB);
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(cache.Allocate(64 * kKiB));
  for (void* block : blocks) cache.Free(block, 64 * kKiB);
  EXPECT_EQ(cache.kept(), 256 * kKiB);  // blocks[0] has gone
  cache.Free(cache.Allocate(128 * kKiB), 128 * kKiB);
  EXPECT_EQ(cache.kept(), 256 * kKiB);  // and blocks[1] and [2]
  EXPECT_EQ(cache.Allocate(64 * kKiB), blocks[4]);
  EXPECT_EQ(cache.Allocate(64 * kKiB), blocks[3]);
  EXPECT_EQ(cache.kept(), 128 * kKiB);
  cache.Free(blocks[3], 64 * kKiB);
  cache.Free(blocks[4], 64 * kKiB);
  // One that is larger than all is not kept, and pushes nothing out.
  cache.Free(cache.Allocate(512 * kKiB), 512 * kKiB);
  EXPECT_EQ(cache.kept(), 256 * kKiB);
}

TEST(BlockCacheTest, ManyThreads) {
  BlockCache cache(512 * kKiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 300; ++i) {
        const size_t size = (60 + (i * 13 + t * 7) % 100) * kKiB;
        void* block = cache.Allocate(size);
        std::memset(block, t, 100);
        cache.Free(block, size);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cache.kept(), 512 * kKiB);
}

TEST(SegmentTest, AlignedAndOwned) {
  for (size_t size : {size_t{1}, size_t{63}, 64 * kKiB, 5000 * kKiB + 1}) {
    const Segment segment = AllocateSegment(size);
    ASSERT_NE(segment.data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data) % 64, 0u);
    EXPECT_EQ(segment.size, size);
    EXPECT_EQ(segment.owner.get(), segment.data);
    std::memset(segment.data, 1, size);
  }
  EXPECT_EQ(AllocateSegment(0).data, nullptr);
  EXPECT_EQ(AllocateSegment(0).size, 0u);
}

TEST(SegmentTest, LargeMemoryIsUsedAgain) {
  const size_t size = 3000 * kKiB;
  const void* first = AllocateSegment(size).data;
  EXPECT_EQ(AllocateSegment(size).data, first);
}

TEST(PacketTest, ACopySharesNoMemory) {
  Packet packet;
  packet.bytes = "bytes";
  for (size_t size : {size_t{1}, 100 * kKiB}) {
    packet.segments.push_back(AllocateSegment(size));
    std::memset(packet.segments.back().data, 7, size);
  }
  const Packet copy = CopyPacket(packet);
  EXPECT_EQ(copy.bytes, "bytes");
  ASSERT_EQ(copy.segments.size(), 2u);
  for (size_t s = 0; s < 2; ++s) {
    ASSERT_EQ(copy.segments[s].size, packet.segments[s].size);
    EXPECT_EQ(std::memcmp(copy.segments[s].data, packet.segments[s].data, copy.segments[s].size),
              0);
    packet.segments[s].data[0] = 8;
    EXPECT_EQ(copy.segments[s].data[0], 7);
  }
}

}  // namespace
}  // namespace distgrad
