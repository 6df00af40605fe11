// The common part of the programs that train: options, processes on this machine, errors.
#ifndef DISTGRAD_EXAMPLES_PROGRAM_H_
#define DISTGRAD_EXAMPLES_PROGRAM_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "examples/launcher.h"
#include "examples/options.h"

namespace distgrad {

// Is the body of main(). If a launcher has started this process, it calls `train` as one process of
// that job; else it starts the processes on this machine, each of which does the same. With
// --single it trains alone. Returns the exit status; prints a failure as one line on stderr.
int RunProgram(int argc, char** argv, const CommandLine& line,
               absl::FunctionRef<absl::Status(const Options&, const JobPlace&)> train);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_PROGRAM_H_
