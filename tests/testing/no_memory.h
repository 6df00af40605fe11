// A machine whose memory is used up, as it is for a process at the limit of its user or container.
#ifndef DISTGRAD_TESTS_TESTING_NO_MEMORY_H_
#define DISTGRAD_TESTS_TESTING_NO_MEMORY_H_

#include <sys/resource.h>

#include <cstddef>

namespace distgrad {

// Gives this process, while it lives, at most `left` bytes of addresses beyond those that it has.
// Not for AddressSanitizer and ThreadSanitizer, whose own memory has no such bound. One at a time.
class NoMemory {
 public:
  explicit NoMemory(size_t left);
  ~NoMemory();
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

 private:
  rlimit before_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_NO_MEMORY_H_
