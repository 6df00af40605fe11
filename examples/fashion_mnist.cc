// The main job: trains a network on Fashion-MNIST, split over worker processes.
//
//   tools/bazel run //examples:fashion_mnist
//   tools/bazel run //examples:fashion_mnist -- --help
#include <memory>
#include <utility>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/checkpoint/job/part.h"
#include "core/worker/worker.h"
#include "examples/checkpointing.h"
#include "examples/devices.h"
#include "examples/distributed.h"
#include "examples/interrupt.h"
#include "examples/launcher.h"
#include "examples/model.h"
#include "examples/options.h"
#include "examples/program.h"
#include "examples/single.h"
#include "examples/trace_file.h"
#include "examples/training.h"

namespace distgrad {
namespace {

// A stage; and with worker 0's, which run it is of.
CheckpointContents Contents(const StageServer& stage, const Options& options, int micro_batches,
                            int rank) {
  CheckpointContents contents = stage.Contents();
  // The learning rate goes down to 0 in the last epoch.
  const CheckpointValues values = {{"seed", absl::StrCat(options.seed)},
                                   {"batch", absl::StrCat(options.batch)},
                                   {"micro-batches", absl::StrCat(micro_batches)},
                                   {"epochs", absl::StrCat(options.epochs)},
                                   {"lr", absl::StrCat(options.learning_rate)}};
  if (rank == 0) SaveRunOptions(values, contents);
  return contents;
}

// Runs one worker of the job. Worker 0 leads; the others serve until the job ends.
absl::Status TrainDistributed(const Options& options, int micro_batches, const JobPlace& place) {
  DG_ASSIGN_OR_RETURN(TraceFile trace, TraceFile::Open(options.trace, place.rank));
  std::unique_ptr<Training> training;
  // After Ctrl-C, which comes to all of them, the others are still needed for a last checkpoint.
  if (place.rank == 0 || !options.checkpoint.empty()) CatchInterrupts();
  if (place.rank == 0) {
    DG_ASSIGN_OR_RETURN(training, Training::Create(options));
  }
  DG_ASSIGN_OR_RETURN(const at::Device device, DeviceOf(options.device, place));
  DG_ASSIGN_OR_RETURN(auto device_maps, DeviceMapsOf(options.device, place));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                      Worker::Create({.rendezvous = "env://",
                                      .transport = options.transport,
                                      .timeout = options.timeout,
                                      .join_timeout = options.timeout,
                                      .device_maps = std::move(device_maps)}));
  DG_ASSIGN_OR_RETURN(
      const std::unique_ptr<StageServer> stage,
      StageServer::Create(worker.get(), options.seed, trace.StageRecorder(), device));
  std::unique_ptr<CheckpointPart> part;
  if (!options.checkpoint.empty()) {
    DG_ASSIGN_OR_RETURN(
        part,
        CheckpointPart::Create(worker.get(), Contents(*stage, options, micro_batches, place.rank)));
  }
  // Before the others may call, so that each call is in the traces of both.
  DG_RETURN_IF_ERROR(trace.Start(*worker));
  DG_RETURN_IF_ERROR(worker->Barrier(absl::Now() + options.timeout));
  if (training != nullptr) {
    DistributedLearner learner(worker.get(), micro_batches);
    DG_RETURN_IF_ERROR(TrainFromCheckpoints(
        worker.get(), options, [&](int64_t steps) { return training->Resume(steps); },
        [&](const Training::Save& save) { return training->Run(learner, save); }));
  }
  // Worker 0 counts on the others until then, however long it trains.
  DG_RETURN_IF_ERROR(worker->Shutdown());
  return trace.Finish(*worker);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  int micro_batches = 4;
  distgrad::CommandLine line = {
      .name = "fashion_mnist",
      .description =
          "Trains a small convolutional network on Fashion-MNIST, its layers split over worker\n"
          "processes that this program starts on this machine. Where a launcher has set RANK and\n"
          "WORLD_SIZE, it joins that job as one worker instead.\n",
      .processes = "--workers",
      .processes_description = "Worker processes, each with some of the layers",
      .most_processes = distgrad::kLayers,
      .has_device = true,
      .has_worker_options = true,
      .check = [](distgrad::Options& options) {
        const absl::Status device = distgrad::CheckDevice(options.device);
        return device.ok() ? distgrad::CheckCheckpointFolder(options) : device;
      }};
  line.add = [&](CLI::App& app) {
    app.add_option("--micro-batches", micro_batches,
                   "Parts of each batch, which go through the layers one behind the other")
        ->type_name("N")
        ->capture_default_str()
        ->check(CLI::Range(1, 1024))
        ->excludes(app.get_option("--single"));
  };
  return distgrad::RunProgram(argc, argv, line,
                              {distgrad::TrainSingle, [&](const distgrad::Options& options,
                                                          const distgrad::JobPlace& place) {
                                 return distgrad::TrainDistributed(options, micro_batches, place);
                               }});
}
