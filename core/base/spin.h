// Waiting actively for a moment before sleeping.
//
// A thread that sleeps costs the one that wakes it a system call, and itself the time until a
// halted processor runs again: 30 to 50 us on the machine of docs/performance.md, more than all
// else in a small call. So a thread that has reason to expect its event at once polls for it before
// it sleeps, and yields to every other thread that wants the processor.
//
// How far that is worth it is learned: after each time in vain the next ones are left out, twice
// as many as the time before. Where answers take long, or none come, next to nothing is spent.
#ifndef DISTGRAD_CORE_BASE_SPIN_H_
#define DISTGRAD_CORE_BASE_SPIN_H_

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace distgrad {

// A spinner for one thread that waits. Not thread-safe.
class Spin {
 public:
  // How long a thread polls: a few times what sleeping and being woken takes. The long one, for a
  // thread that waits alone and has nothing else to do, lasts while the next worker on a call's way
  // does its part.
  static constexpr std::chrono::microseconds kPatience{200}, kLongPatience{500};

  // Returns whether `ready()` came true within `patience`, or already was.
  template <typename Ready>
  bool Await(Ready ready, std::chrono::microseconds patience) {
    return Await(ready, patience, [] { return false; });
  }
  // Does the same, and calls `poll()` each time before `ready()`: it may bring it about, and true
  // has the patience begin anew.
  template <typename Ready, typename Poll>
  bool Await(Ready ready, std::chrono::microseconds patience, Poll poll) {
    if (ready()) return true;
    if (Alone()) return false;
    if (left_out_ > 0) {
      --left_out_;
      return false;
    }
    auto end = std::chrono::steady_clock::now() + patience;
    do {
      sched_yield();
      const bool anew = poll();
      if (ready()) {
        vain_ = 0;
        return true;
      }
      if (anew) end = std::chrono::steady_clock::now() + patience;
    } while (std::chrono::steady_clock::now() < end);
    vain_ = std::min(vain_ + 1, kMostVain);
    left_out_ = (int64_t{1} << vain_) - 1;
    return false;
  }

  // Returns the calling thread's own. (Not a thread_local of a template, which every library that
  // uses it would export.)
  static Spin& OfThisThread();

  // Returns whether there is but one processor, on which nothing happens while a thread polls.
  static bool Alone();

 private:
  static constexpr int kMostVain = 10;

  int vain_ = 0;          // times in a row
  int64_t left_out_ = 0;  // how many more to leave out
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_SPIN_H_
