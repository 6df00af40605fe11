// Freed blocks of memory, kept for the next allocation of about the same size: fresh pages cost
// more than the copy into them.
#ifndef DISTGRAD_CORE_TRANSPORT_BLOCK_CACHE_H_
#define DISTGRAD_CORE_TRANSPORT_BLOCK_CACHE_H_

#include <cstddef>
#include <deque>
#include <list>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {

// Thread-safe. Must outlive the blocks that it gave out.
class BlockCache {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kSmallestKept = 64 << 10;

  // Keeps at most `limit` bytes of freed blocks; past that the oldest go first.
  explicit BlockCache(size_t limit) : limit_(limit) {}
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;
  ~BlockCache();

  // At least `size` bytes, aligned to kAlignment, not cleared. `size` is not 0. Throws
  // std::bad_alloc if there is no memory even without what is kept.
  void* Allocate(size_t size);

  // Takes a block back; `size` as it was given to Allocate.
  void Free(void* memory, size_t size);

  // The bytes that are kept now.
  size_t kept() const;

  // What is really allocated for `size` bytes: at most a quarter more for a block that is kept.
  static size_t Rounded(size_t size);

 private:
  struct Block {
    void* memory;
    size_t size;  // rounded
  };

  // Constant after construction.
  const size_t limit_;

  void FreeKept();

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  size_t kept_ ABSL_GUARDED_BY(mu_) = 0;
  std::list<Block> blocks_ ABSL_GUARDED_BY(mu_);  // the oldest first
  std::map<size_t, std::deque<std::list<Block>::iterator>> by_size_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_BLOCK_CACHE_H_
