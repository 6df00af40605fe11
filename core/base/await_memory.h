// Waits for memory, where what needs it can neither fail nor be left out: in a destructor, say, or
// where others wait for the word that this thread has for them.
#ifndef DISTGRAD_CORE_BASE_AWAIT_MEMORY_H_
#define DISTGRAD_CORE_BASE_AWAIT_MEMORY_H_

#include <new>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace distgrad {

// Calls `f`, again and again while that throws std::bad_alloc: so it has to do no harm where the
// first part of it was done before. No lock may be held that a thread needs which has memory to
// give back.
template <typename F>
auto AwaitMemory(const F& f) {
  for (;;) {
    try {
      return f();
    } catch (const std::bad_alloc&) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_AWAIT_MEMORY_H_
