// Has an allocation fail, as where memory is short, to see what an exception between two steps
// leaves. Depend on it, and operator new of the whole program can be made to throw.
#ifndef DISTGRAD_TESTS_TESTING_FAIL_ALLOCATION_H_
#define DISTGRAD_TESTS_TESTING_FAIL_ALLOCATION_H_

#include <sys/types.h>

#include "absl/functional/function_ref.h"

namespace distgrad {

// Has this thread's allocation number `nth` from now on throw, where 0 is the next, and those that
// follow it if `count` is more than 1; none if `nth` is negative. Returns whether one has since the
// last call.
bool FailAllocation(int nth, int count = 1);

// Does the same to another thread of this process, one at a time.
bool FailAllocationOf(pid_t thread, int nth, int count = 1);

// Calls `f` again and again, each time with a function from whose call on memory lacks on the
// thread that calls it: so each allocation there is once the first one to fail, alone or with those
// behind it. Ends when `f`, which ends the lack with FailAllocation(-1), has returned that none
// failed, or when the test has failed.
void FailEachAllocation(absl::FunctionRef<bool(absl::FunctionRef<void()> lack)> f);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_FAIL_ALLOCATION_H_
