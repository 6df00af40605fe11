// The main job: trains a network on Fashion-MNIST, split over worker processes.
//
//   tools/bazel run //examples:fashion_mnist
//   tools/bazel run //examples:fashion_mnist -- --help
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/chrome_trace.h"
#include "core/base/status.h"
#include "core/worker/worker.h"
#include "examples/distributed.h"
#include "examples/interrupt.h"
#include "examples/launcher.h"
#include "examples/model.h"
#include "examples/options.h"
#include "examples/program.h"
#include "examples/training.h"

namespace distgrad {
namespace {

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
  DG_RETURN_IF_ERROR(worker->Barrier(absl::Now() + options.timeout));
  if (training != nullptr) {
    DistributedLearner learner(worker.get());
    DG_RETURN_IF_ERROR(training->Run(learner));
  }
  // Worker 0 counts on the others until then, however long it trains.
  DG_RETURN_IF_ERROR(worker->Shutdown());
  if (trace.has_value()) {
    DG_ASSIGN_OR_RETURN(const Trace recorded, worker->StopTrace());
    *trace << ToChromeTrace(recorded) << std::flush;
    if (!*trace) return absl::DataLossError("--trace: the file could not be written");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  const distgrad::CommandLine line = {
      .name = "fashion_mnist",
      .description =
          "Trains a small convolutional network on Fashion-MNIST, its layers split over worker\n"
          "processes that this program starts on this machine. Where a launcher has set RANK and\n"
          "WORLD_SIZE, it joins that job as one worker instead.\n",
      .processes = "--workers",
      .processes_description = "Worker processes, each with some of the layers",
      .most_processes = distgrad::kLayers,
      .has_worker_options = true};
  return distgrad::RunProgram(argc, argv, line, distgrad::TrainDistributed);
}
