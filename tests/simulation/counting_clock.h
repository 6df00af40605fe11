// The clock of a simulated worker, whose timers can be counted. The linker has NewSystemClock()
// make it (--wrap, BUILD.bazel).
#ifndef DISTGRAD_TESTS_SIMULATION_COUNTING_CLOCK_H_
#define DISTGRAD_TESTS_SIMULATION_COUNTING_CLOCK_H_

#include <memory>

namespace distgrad::simulation {

// Returns what the last clock that this thread has made, and each of its timers, has a share of.
std::weak_ptr<const void> TimersOfNewestClock();

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_COUNTING_CLOCK_H_
