// Puts distgrad and PyTorch's own distributed autograd, driven from C++ without Python, through
// the same scenarios, and prints what came of each.
//
//   tools/bazel run //tests/conformance:reference -- --limit=20
//
// --limit: seconds after which a scenario counts as hanging. Names after it: those alone.
#include <cstdio>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/conformance/measure.h"

int main(int argc, char** argv) {
  if (distgrad::IsScenarioWorker(argc, argv)) distgrad::RunScenarioWorker(argv);
  int limit_seconds = 20;
  std::set<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--limit=")) {
      wanted.insert(argv[i]);
    } else if (!absl::SimpleAtoi(argument, &limit_seconds) || limit_seconds < 1) {
      std::fprintf(stderr, "--limit takes a number of seconds, not '%s'\n", argv[i]);
      return 2;
    }
  }
  std::vector<const distgrad::Scenario*> scenarios;
  for (const distgrad::Scenario& scenario : distgrad::Scenarios()) {
    if (wanted.empty() || wanted.count(scenario.name) > 0) scenarios.push_back(&scenario);
  }
  const auto ours = distgrad::Measure("distgrad", scenarios, limit_seconds);
  const auto theirs = distgrad::Measure("pytorch", scenarios, limit_seconds);
  std::printf("A scenario that takes more than %d s hangs.\n\n", limit_seconds);
  std::printf("| scenario | | distgrad | PyTorch |\n| --- | --- | --- | --- |\n");
  int unexpected = 0;
  for (size_t i = 0; i < scenarios.size(); ++i) {
    const distgrad::Scenario& s = *scenarios[i];
    std::printf("| %s | %s | %s | %s |\n", s.name, s.text, ours[i].c_str(), theirs[i].c_str());
    unexpected +=
        !distgrad::IsExpected(ours[i], s.distgrad) + !distgrad::IsExpected(theirs[i], s.pytorch);
  }
  if (unexpected > 0) std::printf("\n%d of these are not what is expected.\n", unexpected);
  return unexpected > 0 ? 1 : 0;
}
