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
#include "core/checkpoint/job/checkpoint_manager.h"
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

// Opens the file for a worker's trace, "trace.1.json" of "trace.json" for worker 1: before it
// trains, so that a name that cannot be opened is an error at once.
absl::StatusOr<std::ofstream> OpenTrace(std::filesystem::path path, int rank) {
  path.replace_extension(absl::StrCat(".", rank, path.extension().string()));
  std::ofstream file(path);
  if (file) return file;
  return absl::UnavailableError(absl::StrCat("--trace: cannot write ", path.string()));
}

// What has to be the same for a run to go on as it would have.
CheckpointValues RunValues(const Options& options) {
  // The learning rate goes down to 0 in the last epoch.
  return {{"seed", absl::StrCat(options.seed)},
          {"batch", absl::StrCat(options.batch)},
          {"epochs", absl::StrCat(options.epochs)},
          {"lr", absl::StrCat(options.learning_rate)}};
}

// A stage; and with worker 0's, which run it is of.
CheckpointContents Contents(const StageServer& stage, const Options& options, int rank) {
  CheckpointContents contents = stage.Contents();
  if (rank != 0) return contents;
  contents.save_values = [options] { return RunValues(options); };
  contents.load_values = [options](const LoadedValues& loaded) -> absl::Status {
    for (const auto& [name, value] : RunValues(options)) {
      for (const auto& [worker, values] : loaded.workers) {
        const auto saved = values.find(name);
        if (saved == values.end() || saved->second == value) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("--resume: the checkpoint is of a run with --", name, "=", saved->second));
      }
    }
    return absl::OkStatus();
  };
  return contents;
}

// Trains on worker 0, from and to checkpoints if the options say so.
absl::Status Lead(const Options& options, Worker* worker, Training& training) {
  DistributedLearner learner(worker);
  if (options.checkpoint.empty()) return training.Run(learner);
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> checkpoints,
                      CheckpointManager::Create(worker, options.checkpoint));
  if (options.resume) {
    const absl::StatusOr<LoadedCheckpoint> loaded = checkpoints->Load();
    if (!loaded.ok() && !absl::IsNotFound(loaded.status())) return loaded.status();
    DG_RETURN_IF_ERROR(training.Resume(loaded.ok() ? loaded->step : 0));
  }
  return training.Run(learner, [&](int64_t steps) { return checkpoints->Save(steps); });
}

// Runs one worker of the job. Worker 0 leads; the others serve until the job ends.
absl::Status TrainDistributed(const Options& options, const JobPlace& place) {
  std::optional<std::ofstream> trace;
  if (!options.trace.empty()) {
    DG_ASSIGN_OR_RETURN(trace, OpenTrace(options.trace, place.rank));
  }
  std::unique_ptr<Training> training;
  // After Ctrl-C, which comes to all of them, the others are still needed for a last checkpoint.
  if (place.rank == 0 || !options.checkpoint.empty()) CatchInterrupts();
  if (place.rank == 0) {
    DG_ASSIGN_OR_RETURN(training, Training::Create(options));
  }
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                      Worker::Create({.rendezvous = "env://",
                                      .transport = options.transport,
                                      .timeout = options.timeout,
                                      .join_timeout = options.timeout}));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<StageServer> stage,
                      StageServer::Create(worker.get(), options.seed));
  std::unique_ptr<CheckpointPart> part;
  if (!options.checkpoint.empty()) {
    DG_ASSIGN_OR_RETURN(
        part, CheckpointPart::Create(worker.get(), Contents(*stage, options, place.rank)));
  }
  // Before the others may call, so that each call is in the traces of both.
  if (trace.has_value()) DG_RETURN_IF_ERROR(worker->StartTrace());
  DG_RETURN_IF_ERROR(worker->Barrier(absl::Now() + options.timeout));
  if (training != nullptr) DG_RETURN_IF_ERROR(Lead(options, worker.get(), *training));
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
