// Sorts free blocks by size, and frees the oldest beyond a bound.
#include "core/transport/block_cache.h"

#include <cstdint>
#include <cstdlib>
#include <new>

// A block that is kept is nobody's: let AddressSanitizer report whoever still touches it.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace distgrad {

size_t BlockCache::Rounded(size_t size) {
  // Steps of a quarter of the power of two at or below the size.
  size_t step = kAlignment;
  if (size >= kSmallestKept) {
    while (step <= size / 8) step *= 2;
  }
  return (size + step - 1) / step * step;
}

BlockCache::~BlockCache() { FreeKept(); }

void* BlockCache::Allocate(size_t size) {
  if (size > PTRDIFF_MAX) throw std::bad_alloc();  // below that, rounding cannot overflow
  const size_t rounded = Rounded(size);
  if (rounded >= kSmallestKept) {
    absl::MutexLock lock(&mu_);
    const auto found = by_size_.find(rounded);
    if (found != by_size_.end()) {
      const auto newest = found->second.back();  // the likeliest to be in the processor's cache
      void* memory = newest->memory;
      found->second.pop_back();
      if (found->second.empty()) by_size_.erase(found);
      blocks_.erase(newest);
      kept_ -= rounded;
      ASAN_UNPOISON_MEMORY_REGION(memory, rounded);
      return memory;
    }
  }
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) {
    FreeKept();
    memory = std::aligned_alloc(kAlignment, rounded);
  }
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void BlockCache::FreeKept() {
  std::list<Block> blocks;
  {
    absl::MutexLock lock(&mu_);
    blocks.swap(blocks_);
    by_size_.clear();
    kept_ = 0;
  }
  for (const Block& block : blocks) {
    ASAN_UNPOISON_MEMORY_REGION(block.memory, block.size);
    std::free(block.memory);
  }
}

void BlockCache::Free(void* memory, size_t size) {
  const size_t rounded = Rounded(size);
  if (rounded < kSmallestKept || rounded > limit_) {
    std::free(memory);
    return;
  }
  std::list<Block> too_many;  // freed without the lock: it takes a while
  {
    absl::MutexLock lock(&mu_);
    ASAN_POISON_MEMORY_REGION(memory, rounded);
    by_size_[rounded].push_back(blocks_.insert(blocks_.end(), Block{memory, rounded}));
    kept_ += rounded;
    while (kept_ > limit_) {
      const auto found = by_size_.find(blocks_.front().size);
      found->second.pop_front();  // of its size too it is the oldest
      if (found->second.empty()) by_size_.erase(found);
      kept_ -= blocks_.front().size;
      too_many.splice(too_many.end(), blocks_, blocks_.begin());
    }
  }
  for (const Block& block : too_many) {
    ASAN_UNPOISON_MEMORY_REGION(block.memory, block.size);
    std::free(block.memory);
  }
}

size_t BlockCache::kept() const {
  absl::MutexLock lock(&mu_);
  return kept_;
}

}  // namespace distgrad
