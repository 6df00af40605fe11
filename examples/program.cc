// Decides what this process is: the one that was typed, or one of a job.
#include "examples/program.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>

#include "absl/status/statusor.h"
#include "core/worker/failure.h"
#include "examples/interrupt.h"
#include "examples/single.h"
#include "examples/training.h"

namespace distgrad {
namespace {

// Says what went wrong, in one line, to the launcher too; returns the exit status for it.
int ExitStatus(const std::string& program, const absl::Status& status) {
  if (const int signal = InterruptedBy(); signal != 0) {
    std::fprintf(stderr, "%s: interrupted\n", program.c_str());
    return 128 + signal;
  }
  if (status.ok()) return 0;
  ReportFailure(status).IgnoreError();  // it stands on stderr, too
  std::fprintf(stderr, "%s: %s\n", program.c_str(), std::string(status.message()).c_str());
  return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
}

// Starts this program again with OpenMP threads that sleep while they wait, unless the user has
// chosen. By default they spin, which makes training ten times slower as soon as other processes
// want the cores too. libgomp reads the variable when it is loaded, before main().
void AskForSleepingThreads(char** argv) {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  execv(program.c_str(), argv);  // if it fails, training is slower, no more
}

absl::Status TrainSingle(const Options& options) {
  CatchInterrupts();
  absl::StatusOr<std::unique_ptr<Training>> training = Training::Create(options);
  if (!training.ok()) return training.status();
  SingleLearner learner(options.seed);
  return (*training)->Run(learner);
}

}  // namespace

int RunProgram(int argc, char** argv, const CommandLine& line,
               absl::FunctionRef<absl::Status(const Options&, const JobPlace&)> train) {
  const absl::StatusOr<Options> options = ParseOptions(argc, argv, line);
  if (!options.ok()) return ExitStatus(line.name, options.status());
  if (!options->help.empty()) {
    std::fputs(options->help.c_str(), stdout);
    return 0;
  }
  if (getenv("OMP_WAIT_POLICY") == nullptr) AskForSleepingThreads(argv);
  if (options->single) return ExitStatus(line.name, TrainSingle(*options));

  const absl::StatusOr<std::optional<JobPlace>> place = JobPlaceFromEnvironment();
  if (!place.ok()) return ExitStatus(line.name, place.status());
  if (place->has_value()) return ExitStatus(line.name, train(*options, **place));

  LaunchOptions launch;
  launch.processes = options->processes;
  launch.arguments.assign(argv, argv + argc);
  const absl::StatusOr<int> status = Launch(launch);
  return status.ok() ? *status : ExitStatus(line.name, status.status());
}

}  // namespace distgrad
