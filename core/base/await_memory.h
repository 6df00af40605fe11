// Waits for memory, where what needs it can neither fail nor be left out: in a destructor, or where
// others wait for the word that this thread has for them. A last resort: better is what needs none,
// and on the clock's thread what is called again (clock.h).
#ifndef DISTGRAD_CORE_BASE_AWAIT_MEMORY_H_
#define DISTGRAD_CORE_BASE_AWAIT_MEMORY_H_

#include <new>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace distgrad {

// Calls `f`, again and again while that throws std::bad_alloc: so the first part of it must be
// harmless to do twice. No lock may be held: who needs it may have memory to give back.
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
