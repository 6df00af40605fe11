// Chaos by hand:
//
//   tools/bazel run //tests/chaos -- --minutes 10 [--seed 7]
//
// docs/testing.md says what it does and checks, and docs/reliability.md has the table of a run.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <random>
#include <string>

#include "absl/time/time.h"
#include "tests/chaos/chaos.h"
#include "tests/chaos/fault_plan.h"
#include "tests/chaos/worker.h"
#include "tests/hosts/hosts.h"

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string(distgrad::kChaosWorker)) {
    return distgrad::RunChaosWorker(distgrad::ToChaosWorkerOptions({argv + 2, argv + argc}));
  }
  double minutes = 0;
  distgrad::ChaosOptions options;
  options.seed = std::random_device()();
  options.workers = options.hosts = 0;
  CLI::App app("Trains over several processes and hosts while faults come one after the other.");
  app.add_option("--minutes", minutes, "For how long")->check(CLI::PositiveNumber);
  app.add_option("--faults", options.faults, "Or how many of them")->check(CLI::PositiveNumber);
  app.add_option("--seed", options.seed, "Chooses what goes wrong, where and when");
  app.add_option("--workers", options.workers, "Processes; by default 4 to 8, by the seed")
      ->check(CLI::Range(2, 8));
  app.add_option("--hosts", options.hosts, "By default 2 to 4, by the seed")
      ->check(CLI::Range(1, 4));
  app.add_option("--only", options.only, "Only these kinds of faults, separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(distgrad::FaultPlan::Names()));
  CLI11_PARSE(app, argc, argv);
  if (minutes > 0) options.duration = absl::Minutes(minutes);
  if (minutes == 0 && app.count("--faults") == 0) options.duration = absl::Minutes(1);
  if (options.workers == 0) options.workers = 4 + static_cast<int>(options.seed % 5);
  if (options.hosts == 0) options.hosts = 2 + static_cast<int>(options.seed / 5 % 3);
  return distgrad::RunInNamespaces([&] {
    const distgrad::ChaosResult result = distgrad::RunChaos(options);
    return result.wrong.empty() ? 0 : 1;
  });
}
