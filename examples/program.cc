// Runs this process as the one that the user started, or as one of a job.
#include "examples/program.h"

#include <malloc.h>

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

// Has malloc keep what a step frees for the next one. By default glibc gives much of it back to the
// system, and then takes it again page by page, which costs `fashion_mnist --single` more than a
// third of its time. Blocks of more than 32 MiB are the system's in any case; and where malloc is
// another one, as AddressSanitizer's, it stays as it is.
void KeepFreedMemory() {
  constexpr int kLargestBlock = 32 << 20, kKept = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kLargestBlock);
  mallopt(M_TRIM_THRESHOLD, kKept);
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
    KeepFreedMemory();
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
