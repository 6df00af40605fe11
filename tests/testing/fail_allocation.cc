// Counts the allocations of a thread down to the one that fails.
#include "tests/testing/fail_allocation.h"

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace {

thread_local int left = -1;  // before the one that fails
thread_local bool failed = false;

}  // namespace

void* operator new(size_t size) {
  if (left >= 0 && left-- == 0) {
    failed = true;
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace distgrad {

bool FailAllocation(int nth) {
  left = nth;
  return std::exchange(failed, false);
}

}  // namespace distgrad
