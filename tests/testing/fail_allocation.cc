// Counts the allocations of a thread down to the one that fails.
#include "tests/testing/fail_allocation.h"

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "gtest/gtest.h"

namespace {

struct Lack {
  std::atomic<int> left{-1};  // before the one that fails
  std::atomic<int> fail{1};   // so many
  std::atomic<bool> failed{false};
};

thread_local Lack own;
Lack of_other;
std::atomic<pid_t> other{0};  // 0: none

bool Fails() {
  Lack& lack = other != 0 && other == gettid() ? of_other : own;
  if (lack.left == 0) {
    if (--lack.fail == 0) lack.left = -1;
    lack.failed = true;
    return true;
  }
  if (lack.left > 0) --lack.left;
  return false;
}

}  // namespace

// The forms with std::nothrow are here too: those of AddressSanitizer would not fit the delete
// below.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return Fails() ? nullptr : std::malloc(size);
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
  own.left = nth;
  own.fail = count;
  return own.failed.exchange(false);
}

bool FailAllocationOf(pid_t thread, int nth, int count) {
  other = 0;
  of_other.left = nth;
  of_other.fail = count;
  if (nth >= 0) other = thread;
  return of_other.failed.exchange(false);
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
