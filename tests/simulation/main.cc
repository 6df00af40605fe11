// Runs many seeds, and makes what fails smaller.
//
//   tools/bazel run //tests/simulation -- --seeds 1000 --from 0
//   tools/bazel run //tests/simulation -- --from 17 --trace       # one seed, with all that happens
//
// With --first it ends with the first seed that fails, with --whole nothing is made smaller, with
// --twice each seed has to take the same course again. --faults is a set of Faults (job.h).
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/simulation/job.h"
#include "tests/simulation/runner.h"

namespace distgrad::simulation {
namespace {

// Leaves out actions for as long as what is left fails.
std::vector<int> Shrink(Runner& runner, uint64_t seed, unsigned faults) {
  std::vector<int> without;
  const int count = static_cast<int>(PlanOf(OrderText(seed, faults, {})).actions.size());
  for (int i = 0; i < count; ++i) {
    without.push_back(i);
    if (runner.Run(OrderText(seed, faults, without)).ok) without.pop_back();
  }
  return without;
}

int Main(int argc, char** argv) {
  uint64_t seeds = 1, from = 0, failed = 0;
  unsigned faults = kAllFaults;
  bool trace = false, twice = false, first = false, shrink = true;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view option = argv[i];
    const bool has_value = i + 1 < argc;
    if (option == "--trace") {
      trace = true;
    } else if (option == "--twice") {
      twice = true;
    } else if (option == "--first") {
      first = true;
    } else if (option == "--whole") {
      shrink = false;
    } else if (!has_value || !((option == "--seeds" && absl::SimpleAtoi(argv[i + 1], &seeds)) ||
                               (option == "--from" && absl::SimpleAtoi(argv[i + 1], &from)) ||
                               (option == "--faults" && absl::SimpleAtoi(argv[i + 1], &faults)))) {
      std::fprintf(stderr, "usage: simulation [--seeds N] [--from S] [--faults BITS] [--trace]\n");
      return 2;
    } else {
      ++i;
    }
  }
  Runner runner(RunJob, WarmUp);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t switches = 0;
  double simulated = 0;
  for (uint64_t seed = from; seed < from + seeds; ++seed) {
    const std::string order = OrderText(seed, faults, {}, trace);
    Outcome outcome = runner.Run(order);
    switches += outcome.course.switches;
    simulated += static_cast<double>(outcome.course.time) * 1e-9;
    if (trace) std::fputs(outcome.printed.c_str(), stdout);
    if (twice && runner.Run(order).course.hash != outcome.course.hash) {
      outcome.ok = false;
      outcome.wrong = absl::StrCat("it takes another course each time: ", outcome.wrong);
    }
    if (outcome.ok) continue;
    ++failed;
    if (first && failed == 1) seeds = seed - from + 1;
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), outcome.wrong.c_str());
    if (!shrink) continue;
    const std::vector<int> without = Shrink(runner, seed, faults);
    const Outcome small = runner.Run(OrderText(seed, faults, without));
    std::printf("%s%s\n%s\n", Text(PlanOf(OrderText(seed, faults, without))).c_str(),
                small.wrong.c_str(), small.printed.c_str());
    std::fflush(stdout);
  }
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf(
      "%llu of %llu seeds failed; %.1f s, in which %.0f s were simulated, with %llu changes "
      "of threads\n",
      static_cast<unsigned long long>(failed), static_cast<unsigned long long>(seeds), took,
      simulated, static_cast<unsigned long long>(switches));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  distgrad::simulation::Runner::FixAddresses(argv);
  return distgrad::simulation::Main(argc, argv);
}
