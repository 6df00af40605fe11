// The command line of the example.
#ifndef DISTGRAD_EXAMPLES_OPTIONS_H_
#define DISTGRAD_EXAMPLES_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace distgrad {

struct Options {
  bool single = false;
  int workers = 2;
  int epochs = 5;
  int64_t batch = 128;
  double learning_rate = 0.1;
  uint64_t seed = 1;
  std::string data;    // empty: look for it
  std::string output;  // absolute
  std::string transport = "socket";
  std::string trace;  // absolute; empty: none
  absl::Duration timeout = absl::Seconds(60);
  // Not empty if --help was asked for: what to print.
  std::string help;
};

// kInvalidArgument says in one line what is wrong. `most_workers` is the limit of --workers.
absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv, int most_workers);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_OPTIONS_H_
