// The command line of the examples that train.
#ifndef DISTGRAD_EXAMPLES_OPTIONS_H_
#define DISTGRAD_EXAMPLES_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace distgrad {

struct Options {
  bool single = false;
  int processes = 2;
  int epochs = 5;
  int64_t batch = 128;
  double learning_rate = 0.1;
  uint64_t seed = 1;
  std::string data;    // empty: look for it
  std::string output;  // absolute
  std::string transport = "socket";
  std::string trace;       // absolute; empty: none
  std::string checkpoint;  // absolute; empty: none
  int64_t every = 200;
  bool resume = false;
  absl::Duration timeout = absl::Seconds(60);
  // The text to print, if --help was given; else empty.
  std::string help;
};

// The differences between the command lines of the two programs.
struct CommandLine {
  std::string name;         // of the program, and of the folder that it writes to
  std::string description;  // for --help
  // The option that says how many processes there are: "--workers".
  std::string processes;
  std::string processes_description;
  int most_processes = 1;
  bool has_worker_options = false;  // --transport, --trace, and those of checkpoints
};

// Parses a command line. kInvalidArgument says in one line what is wrong.
absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv, const CommandLine& line);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_OPTIONS_H_
