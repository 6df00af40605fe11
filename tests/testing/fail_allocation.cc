// Counts the allocations of a thread down to the one that fails.
#include "tests/testing/fail_allocation.h"

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#include "gtest/gtest.h"

namespace {

thread_local int left = -1;  // before the one that fails
thread_local int fail = 1;   // so many
thread_local bool failed = false;

}  // namespace

// The forms with std::nothrow are here too: those of AddressSanitizer would not fit the delete
// below.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (left == 0) {
    if (--fail == 0) left = -1;
    failed = true;
    return nullptr;
  }
  if (left > 0) --left;
  return std::malloc(size);
}
void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return operator new(size, std::nothrow);
}
void* operator new(size_t size) {
  if (void* const memory = operator new(size, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace distgrad {

bool FailAllocation(int nth, int count) {
  left = nth;
  fail = count;
  return std::exchange(failed, false);
}

void FailEachAllocation(absl::FunctionRef<bool(absl::FunctionRef<void()> lack)> f) {
  for (const int count : {1, 20}) {
    for (int nth = 0; f([&] { FailAllocation(nth, count); }); ++nth) {
      // A trace would not reach the other threads.
      ASSERT_FALSE(testing::Test::HasFailure())
          << "where " << count << " allocations failed, from number " << nth << " on";
    }
  }
}

}  // namespace distgrad
