// A soak by hand:
//
//   tools/bazel run //tests/soak -- --minutes 60 [--seed 7]
//
// docs/operating.md, "Jobs that last", says what it does, and has the table of a run.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <random>
#include <string>

#include "absl/time/time.h"
#include "tests/soak/soak.h"
#include "tests/soak/worker.h"

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string(distgrad::kSoakWorker)) {
    return distgrad::RunSoakWorker(distgrad::FromArguments({argv + 2, argv + argc}));
  }
  double minutes = 10;
  uint64_t seed = std::random_device()();
  CLI::App app("Runs a job of four processes, disturbs it, and looks for what grows.");
  app.add_option("--minutes", minutes, "For how long; growth is judged from 5 on")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", seed, "Chooses what is done, and to whom");
  CLI11_PARSE(app, argc, argv);
  return distgrad::RunSoak({.duration = absl::Minutes(minutes), .seed = seed}).empty() ? 0 : 1;
}
