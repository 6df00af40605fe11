// Deadlines, which the wall clock cannot move.
//
//   absl::StatusOr<std::string> value = store->Get("key", absl::Now() + absl::Seconds(5));
//
// A time of the wall clock is converted to the machine's monotonic clock where it becomes a
// Deadline: at the boundary, and once. What waits goes by that clock alone, so it does not matter
// if the wall clock is set meanwhile.
#ifndef DISTGRAD_CORE_BASE_DEADLINE_H_
#define DISTGRAD_CORE_BASE_DEADLINE_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/time/time.h"

namespace distgrad {

// Immutable but for assignment.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Converts a time of the wall clock as it stands now. absl::InfiniteFuture() never comes, and
  // absl::InfinitePast() has passed.
  Deadline(absl::Time wall);  // NOLINT: implicit

  static Deadline After(absl::Duration timeout);
  static Deadline Never() { return Deadline(Clock::time_point::max()); }

  bool is_never() const { return at_ == Clock::time_point::max(); }
  bool Passed() const;
  // Returns the time left until then; 0 once it has passed.
  absl::Duration Left() const;
  Clock::time_point at() const { return at_; }

  friend bool operator==(Deadline a, Deadline b) { return a.at_ == b.at_; }
  friend bool operator<(Deadline a, Deadline b) { return a.at_ < b.at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

// One thread that sleeps until another wakes it, or until a deadline. absl's timed waits follow the
// wall clock. Thread-safe.
class Sleeper {
 public:
  // Sleeps; returns whether it was woken.
  bool Sleep(Deadline deadline);
  void Wake();

 private:
  std::mutex mu_;
  std::condition_variable wake_;
  bool woken_ = false;  // guarded by mu_
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_DEADLINE_H_
