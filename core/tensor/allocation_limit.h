// Bounds what code that others ask for allocates.
//
//   const AllocationLimit limit(bytes, "limit message_bytes");
//   at::ones({int64_t{1} << 40});  // throws: kResourceExhausted
#ifndef DISTGRAD_CORE_TENSOR_ALLOCATION_LIMIT_H_
#define DISTGRAD_CORE_TENSOR_ALLOCATION_LIMIT_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace distgrad {

// Limits what the calling thread allocates for tensors on the CPU, to the end of the scope, to
// `bytes`. What would be more throws a StatusError, and nothing is allocated for it. Memory that is
// freed meanwhile counts too. An inner scope counts for itself alone.
//
// It sees what goes through libtorch's CPU allocator, which it wraps once for the process: neither
// the memory of accelerators nor what libtorch's own threads allocate for a parallel loop. It
// bounds nothing once that allocator has been replaced.
//
// Stays on its thread.
class AllocationLimit {
 public:
  // `name` says in errors what the limit is called, and outlives this.
  AllocationLimit(uint64_t bytes, absl::string_view name);
  ~AllocationLimit();
  AllocationLimit(const AllocationLimit&) = delete;
  AllocationLimit& operator=(const AllocationLimit&) = delete;

  // Throws if this is too much.
  void Take(uint64_t bytes);

 private:
  const uint64_t bytes_;
  const absl::string_view name_;
  AllocationLimit* const outer_;
  uint64_t taken_ = 0;
};

// Exempts what the calling thread allocates, to the end of the scope, from any limit: it works for
// others. Stays on its thread.
class AllocationLimitPause {
 public:
  AllocationLimitPause();
  ~AllocationLimitPause();
  AllocationLimitPause(const AllocationLimitPause&) = delete;
  AllocationLimitPause& operator=(const AllocationLimitPause&) = delete;

 private:
  AllocationLimit* const paused_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_ALLOCATION_LIMIT_H_
