// The plan by which many copies are spread over the threads of one kernel. The kernel
// (copy_kernel.cu) is these functions and nothing more, so that they can be run, thread by thread,
// on a machine without a GPU too.
//
// Every copy is cut into tiles of kTileBytes, and the tiles of all copies are numbered through. A
// block of threads takes a tile, finds its copy by binary search, and copies it in the widest words
// that both ends are aligned to.
#ifndef DISTGRAD_CORE_PARALLEL_CUDA_COPY_PLAN_H_
#define DISTGRAD_CORE_PARALLEL_CUDA_COPY_PLAN_H_

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DG_HOST_DEVICE __host__ __device__
#else
#define DG_HOST_DEVICE
#endif

namespace distgrad {

// `bytes` from `from` to `to`, at any alignment. No job reads what it or another one writes.
struct CopyJob {
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t bytes = 0;
};

// Four words of 16 bytes for each of a block's threads.
inline constexpr uint32_t kTileBytes = 16 << 10;

// What one launch can do: its table travels in the kernel's parameters, which are limited to
// 32,764 bytes (CUDA C++ Programming Guide, "Kernel Function Parameters"), and so needs no memory
// of its own on either side that would have to outlive the call.
inline constexpr uint32_t kJobsPerLaunch = 1024;

struct CopyTable {
  CopyJob jobs[kJobsPerLaunch];
  uint32_t first_tile[kJobsPerLaunch + 1];  // and behind the last job the number of all tiles
  uint32_t count = 0;

  DG_HOST_DEVICE uint32_t tiles() const { return first_tile[count]; }
};
static_assert(sizeof(CopyTable) <= 32764, "must fit into a kernel's parameters");

// Fills the table with as many of the jobs as one launch can do, leaving out empty ones; returns
// how many were dealt with.
inline size_t FillTable(const CopyJob* jobs, size_t count, CopyTable* table) {
  table->count = 0;
  table->first_tile[0] = 0;
  size_t next = 0;
  for (; next < count && table->count < kJobsPerLaunch; ++next) {
    if (jobs[next].bytes == 0) continue;
    const uint64_t tiles = (jobs[next].bytes + kTileBytes - 1) / kTileBytes;
    if (tiles > UINT32_MAX - table->tiles()) break;  // 64 TiB; a job of as much is refused
    table->jobs[table->count] = jobs[next];
    table->first_tile[table->count + 1] = table->tiles() + static_cast<uint32_t>(tiles);
    ++table->count;
  }
  return next;
}

namespace internal {

// Words that may alias: the bytes are those of any type.
struct __attribute__((may_alias, aligned(16))) Word16 {
  uint32_t words[4];
};
struct __attribute__((may_alias, aligned(8))) Word8 {
  uint32_t words[2];
};
typedef uint32_t __attribute__((may_alias)) Word4;
typedef uint16_t __attribute__((may_alias)) Word2;
typedef uint8_t __attribute__((may_alias)) Word1;

// Copies the share of one of `threads` threads.
template <typename Word>
DG_HOST_DEVICE inline void CopyWords(uint8_t* __restrict__ to, const uint8_t* __restrict__ from,
                                     uint32_t bytes, uint32_t thread, uint32_t threads) {
  auto* const to_words = reinterpret_cast<Word*>(to);
  const auto* const from_words = reinterpret_cast<const Word*>(from);
  const uint32_t words = bytes / sizeof(Word);
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
  for (uint32_t i = thread; i < words; i += threads) to_words[i] = from_words[i];
  const uint32_t rest = words * sizeof(Word);  // where what is shorter than a word begins
  for (uint32_t i = rest + thread; i < bytes; i += threads) to[i] = from[i];
}

// Returns the last job that does not begin behind the tile.
DG_HOST_DEVICE inline uint32_t JobOfTile(const CopyTable& table, uint32_t tile) {
  uint32_t low = 0;
  uint32_t high = table.count;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (table.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace internal

// Copies what thread `thread` of a block of `threads` has to of one of table.tiles() tiles.
DG_HOST_DEVICE inline void CopyTile(const CopyTable& table, uint32_t tile, uint32_t thread,
                                    uint32_t threads) {
  const uint32_t index = internal::JobOfTile(table, tile);
  const CopyJob& job = table.jobs[index];
  const uint64_t offset = uint64_t{tile - table.first_tile[index]} * kTileBytes;
  const uint64_t left = job.bytes - offset;
  const uint32_t bytes = left < kTileBytes ? static_cast<uint32_t>(left) : kTileBytes;
  auto* const to = static_cast<uint8_t*>(job.to) + offset;
  const auto* const from = static_cast<const uint8_t*>(job.from) + offset;

  const uintptr_t both = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (both % 16 == 0) {
    internal::CopyWords<internal::Word16>(to, from, bytes, thread, threads);
  } else if (both % 8 == 0) {
    internal::CopyWords<internal::Word8>(to, from, bytes, thread, threads);
  } else if (both % 4 == 0) {
    internal::CopyWords<internal::Word4>(to, from, bytes, thread, threads);
  } else if (both % 2 == 0) {
    internal::CopyWords<internal::Word2>(to, from, bytes, thread, threads);
  } else {
    internal::CopyWords<internal::Word1>(to, from, bytes, thread, threads);
  }
}

}  // namespace distgrad

#undef DG_HOST_DEVICE

#endif  // DISTGRAD_CORE_PARALLEL_CUDA_COPY_PLAN_H_
