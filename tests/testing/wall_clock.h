// A wall clock that a test can set, as an operator or a time server does: what links this has a
// clock_gettime() of its own.
#ifndef DISTGRAD_TESTS_TESTING_WALL_CLOCK_H_
#define DISTGRAD_TESTS_TESTING_WALL_CLOCK_H_

#include "absl/time/time.h"

namespace distgrad {

// Sets the wall clock of this process ahead of the machine's by `by` (behind, if negative).
void SetWallClockAhead(absl::Duration by);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_WALL_CLOCK_H_
