// A job that trains over several processes and hosts while a seed chooses what goes wrong: one
// fault after the other, of process_faults.h, cable_faults.h and resource_faults.h. docs/testing.md
// says what is checked.
//
//   std::vector<std::string> wrong = RunChaos({.faults = 26, .seed = 7});
//
// The program that calls it runs RunChaosWorker() when its first argument is kChaosWorker, and all
// else in RunInNamespaces().
#ifndef DISTGRAD_TESTS_CHAOS_CHAOS_H_
#define DISTGRAD_TESTS_CHAOS_CHAOS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace distgrad {

struct ChaosOptions {
  int workers = 4;
  int hosts = 2;  // 1: no namespaces, and no faults of cables and disks
  // It ends after as many faults, or after this time: whichever comes first.
  int faults = 1'000'000;
  absl::Duration duration = absl::InfiniteDuration();
  uint64_t seed = 1;
  // The kinds of faults, by the names of FaultPlan::Names(); empty: all.
  std::vector<std::string> only = {};
  absl::Duration heartbeat_limit = absl::Seconds(3);
};

struct ChaosResult {
  std::vector<std::string> wrong;
  // Why it ran on one host though several were asked for; "" where it did not.
  std::string why_one_host;
};

// Prints a line for each fault, and at the end a table of their kinds.
ChaosResult RunChaos(const ChaosOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_CHAOS_CHAOS_H_
