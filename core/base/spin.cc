// Keeps each thread's own Spin, and counts the processors.
#include "core/base/spin.h"

#include "core/base/processors.h"

namespace distgrad {

Spin& Spin::OfThisThread() {
  thread_local Spin spin;
  return spin;
}

bool Spin::Alone() {
  static const bool alone = UsableProcessors() < 2;
  return alone;
}

}  // namespace distgrad
