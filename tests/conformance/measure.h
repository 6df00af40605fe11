// Puts one side through scenarios, in processes of their own.
//
//   int main(int argc, char** argv) {
//     if (IsScenarioWorker(argc, argv)) RunScenarioWorker(argv);
//     ...
//   }
#ifndef DISTGRAD_TESTS_CONFORMANCE_MEASURE_H_
#define DISTGRAD_TESTS_CONFORMANCE_MEASURE_H_

#include <string>
#include <vector>

#include "tests/conformance/scenarios.h"

namespace distgrad {

// What came of each, in their order. `side` is "distgrad" or "pytorch". A scenario that takes
// longer than `limit_seconds` hangs: its worker 0 is ended, and the next has new processes.
std::vector<std::string> Measure(const std::string& side,
                                 const std::vector<const Scenario*>& scenarios, int limit_seconds);

bool IsScenarioWorker(int argc, char** argv);
[[noreturn]] void RunScenarioWorker(char** argv);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CONFORMANCE_MEASURE_H_
