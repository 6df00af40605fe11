// The main() of tests that run orders.
#ifndef DISTGRAD_TESTS_SIMULATION_RUNNER_TESTS_H_
#define DISTGRAD_TESTS_SIMULATION_RUNNER_TESTS_H_

#include <gtest/gtest.h>

#include "tests/simulation/runner.h"

namespace distgrad::simulation {

// Runs all tests, with a runner of that function, as Runner::Serve() has it, in *runner meanwhile.
inline int RunTests(int argc, char** argv, Runner::Function function, void (*warm_up)(),
                    Runner** runner) {
  Runner::Serve(function, warm_up);
  ::testing::InitGoogleTest(&argc, argv);
  Runner of_all;
  *runner = &of_all;
  return RUN_ALL_TESTS();
}

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_RUNNER_TESTS_H_
