// The common part of the programs that train: options, processes on this machine, errors.
#ifndef DISTGRAD_EXAMPLES_PROGRAM_H_
#define DISTGRAD_EXAMPLES_PROGRAM_H_

#include <functional>

#include "absl/status/status.h"
#include "examples/launcher.h"
#include "examples/options.h"

namespace distgrad {

// How a program trains: with --single, and as one process of a job.
struct Trainers {
  std::function<absl::Status(const Options&)> single;
  std::function<absl::Status(const Options&, const JobPlace&)> process;
};

// Is the body of main(). If a launcher has started this process, it trains as one process of that
// job, or with --single alone; else it starts the processes on this machine, each of which does the
// same: one with --single. Returns the exit status; prints a failure as one line on stderr.
int RunProgram(int argc, char** argv, const CommandLine& line, const Trainers& train);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_PROGRAM_H_
