// The main job: trains a network on Fashion-MNIST, split over worker processes.
//
//   tools/bazel run //examples:fashion_mnist
//   tools/bazel run //examples:fashion_mnist -- --help
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/chrome_trace.h"
#include "core/base/status.h"
#include "core/worker/failure.h"
#include "core/worker/worker.h"
#include "examples/distributed.h"
#include "examples/interrupt.h"
#include "examples/launcher.h"
#include "examples/model.h"
#include "examples/options.h"
#include "examples/single.h"
#include "examples/training.h"

namespace distgrad {
namespace {

// Says what went wrong, in one line, to the launcher too; returns the exit status for it.
int ExitStatus(const absl::Status& status) {
  if (const int signal = InterruptedBy(); signal != 0) {
    std::fprintf(stderr, "fashion_mnist: interrupted\n");
    return 128 + signal;
  }
  if (status.ok()) return 0;
  ReportFailure(status).IgnoreError();  // it stands on stderr, too
  std::fprintf(stderr, "fashion_mnist: %s\n", std::string(status.message()).c_str());
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

// The file for a worker's trace: "trace.json" is "trace.1.json" for worker 1. Opened before it
// trains, so that whoever asked for it in vain hears of it now.
absl::StatusOr<std::ofstream> OpenTrace(std::filesystem::path path, int rank) {
  path.replace_extension(absl::StrCat(".", rank, path.extension().string()));
  std::ofstream file(path);
  if (file) return file;
  return absl::UnavailableError(absl::StrCat("--trace: cannot write ", path.string()));
}

// One worker of the job. Worker 0 leads; the others serve until it has done.
absl::Status TrainDistributed(const Options& options, const JobPlace& place) {
  std::optional<std::ofstream> trace;
  if (!options.trace.empty()) {
    DG_ASSIGN_OR_RETURN(trace, OpenTrace(options.trace, place.rank));
  }
  std::unique_ptr<Training> training;
  if (place.rank == 0) {
    CatchInterrupts();
    DG_ASSIGN_OR_RETURN(training, Training::Create(options));
  }
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                      Worker::Create({.rendezvous = "env://",
                                      .transport = options.transport,
                                      .timeout = options.timeout,
                                      .join_timeout = options.timeout}));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<StageServer> stage,
                      StageServer::Create(worker.get(), options.seed));
  // Before the others may call, so that each call is in the traces of both.
  if (trace.has_value()) DG_RETURN_IF_ERROR(worker->StartTrace());
  DG_RETURN_IF_ERROR(worker->WaitForAll(absl::Now() + options.timeout));
  if (training != nullptr) {
    DistributedLearner learner(worker.get());
    DG_RETURN_IF_ERROR(training->Run(learner));
  }
  // Worker 0 counts on the others until then, however long it trains.
  DG_RETURN_IF_ERROR(worker->Leave(absl::InfiniteFuture()));
  if (trace.has_value()) {
    DG_ASSIGN_OR_RETURN(const Trace recorded, worker->StopTrace());
    *trace << ToChromeTrace(recorded) << std::flush;
    if (!*trace) return absl::DataLossError("--trace: the file could not be written");
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const absl::StatusOr<Options> options = ParseOptions(argc, argv, /*most_workers=*/kLayers);
  if (!options.ok()) return ExitStatus(options.status());
  if (!options->help.empty()) {
    std::fputs(options->help.c_str(), stdout);
    return 0;
  }
  if (getenv("OMP_WAIT_POLICY") == nullptr) AskForSleepingThreads(argv);
  if (options->single) return ExitStatus(TrainSingle(*options));

  const absl::StatusOr<std::optional<JobPlace>> place = JobPlaceFromEnvironment();
  if (!place.ok()) return ExitStatus(place.status());
  if (place->has_value()) return ExitStatus(TrainDistributed(*options, **place));

  LaunchOptions launch;
  launch.processes = options->workers;
  launch.arguments.assign(argv, argv + argc);
  const absl::StatusOr<int> status = Launch(launch);
  return status.ok() ? *status : ExitStatus(status.status());
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
