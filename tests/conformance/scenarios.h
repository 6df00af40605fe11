// The scenarios that both sides are put through, each in a few lines over the interface of side.h.
#ifndef DISTGRAD_TESTS_CONFORMANCE_SCENARIOS_H_
#define DISTGRAD_TESTS_CONFORMANCE_SCENARIOS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/conformance/side.h"

namespace distgrad {

inline constexpr int kScenarioWorkers = 3;
inline constexpr char kSame[] = "as in one process";
// What comes of a scenario whose worker 0 is killed by its alarm.
inline constexpr char kHangs[] = "hangs";

struct Scenario {
  const char* name;  // where PyTorch's own tests have it, theirs
  const char* text;  // for the table
  // On worker 0. Returns what came of it; throws, too.
  std::function<std::string(Side&)> run;
  // What is expected to come of it: how it begins, with '|' between what it may be.
  const char* distgrad;
  const char* pytorch;
  // Leaves processes that are good for nothing else.
  bool last = false;
};

const std::vector<Scenario>& Scenarios();

// Whether it begins in one of the ways of Scenario::distgrad or pytorch.
bool IsExpected(absl::string_view outcome, absl::string_view expected);

// The functions that every worker serves. `rank` is its own.
ServedFunctions FunctionsOf(int rank);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CONFORMANCE_SCENARIOS_H_
