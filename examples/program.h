// What the programs that train have in common: options, processes on this machine, errors.
#ifndef DISTGRAD_EXAMPLES_PROGRAM_H_
#define DISTGRAD_EXAMPLES_PROGRAM_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "examples/launcher.h"
#include "examples/options.h"

namespace distgrad {

// The body of main(). Started by a launcher, or with its variables, it calls `train` as one process
// of that job; else it starts the processes on this machine, each of which does the same. With
// --single it trains alone. Returns the exit status, after a failure with one line on stderr.
int RunProgram(int argc, char** argv, const CommandLine& line,
               absl::FunctionRef<absl::Status(const Options&, const JobPlace&)> train);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_PROGRAM_H_
