// Runs this process as the one that the user started, or as one of a job.
#include "examples/program.h"

#include <cstdio>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/worker/failure.h"
#include "examples/interrupt.h"

namespace distgrad {
namespace {

// Prints what went wrong in one line, reports it to the launcher, and returns the exit status.
// After a signal, which comes to all processes of a job, one of them is enough to say so.
int ExitStatus(const std::string& program, const absl::Status& status, bool says_signal = true) {
  if (const int signal = InterruptedBy(); signal != 0) {
    if (!absl::IsCancelled(status) && !status.ok() && says_signal) {
      std::fprintf(stderr, "%s: %s\n", program.c_str(), std::string(status.message()).c_str());
    }
    if (says_signal) std::fprintf(stderr, "%s: interrupted\n", program.c_str());
    return 128 + signal;
  }
  if (status.ok()) return 0;
  ReportFailure(status).IgnoreError();  // it is on stderr, too
  std::fprintf(stderr, "%s: %s\n", program.c_str(), std::string(status.message()).c_str());
  return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
}

}  // namespace

int RunProgram(int argc, char** argv, const CommandLine& line, const Trainers& train) {
  const absl::StatusOr<Options> options = ParseOptions(argc, argv, line);
  if (!options.ok()) return ExitStatus(line.name, options.status());
  if (!options->help.empty()) {
    std::fputs(options->help.c_str(), stdout);
    return 0;
  }

  const absl::StatusOr<std::optional<JobPlace>> place = JobPlaceFromEnvironment();
  if (!place.ok()) return ExitStatus(line.name, place.status());
  if (place->has_value()) {
    return ExitStatus(line.name,
                      options->single ? train.single(*options) : train.process(*options, **place),
                      (*place)->rank == 0);
  }

  LaunchOptions launch;
  launch.processes = options->single ? 1 : options->processes;
  launch.arguments.assign(argv, argv + argc);
  // After Ctrl-C the job ends its step, and saves.
  if (!options->checkpoint.empty()) launch.grace = absl::Minutes(1);
  const absl::StatusOr<int> status = Launch(launch);
  return status.ok() ? *status : ExitStatus(line.name, status.status());
}

}  // namespace distgrad
