// Replaces clock_gettime(), and moves the wall clock alone.
#include "tests/testing/wall_clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::atomic<int64_t> ahead_ns{0};

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result != 0 || clock != CLOCK_REALTIME) return result;
  const int64_t ns = time->tv_sec * kSecond + time->tv_nsec + ahead_ns;
  time->tv_sec = ns / kSecond;
  time->tv_nsec = ns % kSecond;
  return 0;
}

namespace distgrad {

void SetWallClockAhead(absl::Duration by) { ahead_ns = absl::ToInt64Nanoseconds(by); }

}  // namespace distgrad
