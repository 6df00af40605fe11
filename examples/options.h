// The command line of the examples that train.
#ifndef DISTGRAD_EXAMPLES_OPTIONS_H_
#define DISTGRAD_EXAMPLES_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace CLI {
class App;
}

namespace distgrad {

struct Options {
  bool single = false;
  int processes = 2;
  int epochs = 5;
  int64_t batch = 256;
  double learning_rate = 0.15;
  uint64_t seed = 1;
  std::string data;    // empty: look for it
  std::string output;  // absolute
  std::string device = "cpu";
  std::string transport = "socket";
  std::string trace;       // absolute; empty: none
  std::string checkpoint;  // absolute; empty: none
  int64_t every = 200;
  bool resume = false;
  absl::Duration timeout = absl::Seconds(60);
  // The text to print, if --help was given; else empty.
  std::string help;
};

// The differences between the command lines of the programs.
struct CommandLine {
  std::string name;         // of the program, and of the folder that it writes to
  std::string description;  // for --help
  // The option that says how many processes there are: "--workers". Empty: `check` says it.
  std::string processes;
  std::string processes_description;
  int most_processes = 1;
  bool has_device = false;          // --device
  bool has_worker_options = false;  // --transport, --trace, and those of checkpoints

  // What is said of the options that all have, and what they are by default.
  Options defaults = {};
  bool has_epochs = true;
  std::string batch = "Images per training step";
  std::string seed = "Decides the first weights and the order of the images";
  std::string data =
      "Folder with Fashion-MNIST's four .gz files, if not that of the package "
      "dataset-fashion-mnist";
  // Options of the program's own; and what is to be checked, or set, when all are known.
  std::function<void(CLI::App& app)> add = nullptr;
  std::function<absl::Status(Options& options)> check = nullptr;
};

// Parses a command line. kInvalidArgument says in one line what is wrong.
absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv, const CommandLine& line);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_OPTIONS_H_
