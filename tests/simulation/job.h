// A whole job under simulation: real workers over a network and a store that fail, what they do and
// what becomes of them, all of it by a seed.
#ifndef DISTGRAD_TESTS_SIMULATION_JOB_H_
#define DISTGRAD_TESTS_SIMULATION_JOB_H_

#include <string>

#include "absl/strings/string_view.h"
#include "tests/simulation/plan.h"  // IWYU pragma: export
#include "tests/simulation/scheduler.h"

namespace distgrad::simulation {

// Runs the job of a plan's text, for Runner.
std::string RunJob(absl::string_view order, Course* course);
void WarmUp();

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_JOB_H_
