// Numbers that an attacker cannot guess, and that no two processes are likely to share.
#ifndef DISTGRAD_CORE_BASE_RANDOM_H_
#define DISTGRAD_CORE_BASE_RANDOM_H_

#include <cstdint>
#include <random>

namespace distgrad {

// 64 bits of the system's.
inline uint64_t RandomNumber() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_RANDOM_H_
