// Asks for stacks that no machine has, so that no thread can be made.
#include "tests/testing/no_threads.h"

#include <cstddef>

#include "core/base/check.h"

namespace distgrad {
namespace {

// More than there are addresses: so pthread_create() finds no memory for the stack, and says
// EAGAIN, which is what it says at a limit on processes, too.
constexpr size_t kStackBytes = size_t{1} << 48;

}  // namespace

NoThreads::NoThreads() {
  DG_CHECK(pthread_getattr_default_np(&before_) == 0);
  pthread_attr_t attributes;
  DG_CHECK(pthread_getattr_default_np(&attributes) == 0);
  DG_CHECK(pthread_attr_setstacksize(&attributes, kStackBytes) == 0);
  DG_CHECK(pthread_setattr_default_np(&attributes) == 0);
  pthread_attr_destroy(&attributes);
}

NoThreads::~NoThreads() {
  pthread_setattr_default_np(&before_);
  pthread_attr_destroy(&before_);
}

}  // namespace distgrad
