// Trains a transformer on the King James Version of the Bible as a pipeline over worker processes,
// and has it write.
//
//   tools/bazel run //examples:transformer
//   tools/bazel run //examples:transformer -- --stages 3 --schedule zb_h1 --blocks 6
//   tools/bazel run //examples:transformer -- --help
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/checkpoint/job/part.h"
#include "core/worker/worker.h"
#include "examples/checkpointing.h"
#include "examples/interrupt.h"
#include "examples/launcher.h"
#include "examples/options.h"
#include "examples/program.h"
#include "examples/text.h"
#include "examples/text_training.h"
#include "examples/trace_file.h"
#include "examples/transformer_options.h"
#include "examples/transformer_pipeline.h"
#include "examples/transformer_single.h"

namespace distgrad {
namespace {

absl::Status TrainAlone(const Options& options, const TransformerOptions& own, const Text& text) {
  CatchInterrupts();
  DG_ASSIGN_OR_RETURN(const auto training, TextTraining::Create(options, own, &text));
  DG_ASSIGN_OR_RETURN(const auto learner,
                      SingleTextLearner::Create(own.shape, own.micro_batches, options.seed));
  return training->Run(*learner);
}

// What has to be the same for a run to go on as it would have.
CheckpointValues RunValues(const Options& options, const TransformerOptions& own) {
  return {{"seed", absl::StrCat(options.seed)},        {"batch", absl::StrCat(options.batch)},
          {"lr", absl::StrCat(options.learning_rate)}, {"steps", absl::StrCat(own.steps)},
          {"blocks", absl::StrCat(own.shape.blocks)},  {"width", absl::StrCat(own.shape.width)},
          {"context", absl::StrCat(own.shape.context)}};
}

// Runs one worker of the job. The first worker of each replica leads that, and worker 0 all of
// them; the others serve until the job ends.
absl::Status TrainOnWorker(const Options& options, const TransformerOptions& own, const Text& text,
                           const JobPlace& place) {
  if (place.world_size != options.processes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--stages=", own.stages, " and --replicas=", own.replicas, " need ",
                     options.processes, " workers, and this job has ", place.world_size));
  }
  // Ctrl-C comes to all of them: the others are needed until the step is over, and saved.
  CatchInterrupts();
  const bool leads = place.rank == 0, leads_replica = place.rank % own.stages == 0;
  DG_ASSIGN_OR_RETURN(TraceFile trace, TraceFile::Open(options.trace, place.rank));
  std::unique_ptr<TextTraining> training;
  if (leads_replica) {
    const auto role = leads ? TextTraining::Role::kLead : TextTraining::Role::kFollow;
    DG_ASSIGN_OR_RETURN(training, TextTraining::Create(options, own, &text, role));
  }
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                      Worker::Create({.rendezvous = "env://",
                                      .transport = options.transport,
                                      .timeout = options.timeout,
                                      .join_timeout = options.timeout}));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<TextStageServer> server,
                      TextStageServer::Create(worker.get(), own, options, trace));
  std::atomic<int64_t> first_step{0};
  std::unique_ptr<CheckpointPart> part;
  if (!options.checkpoint.empty()) {
    CheckpointContents contents = server->Contents();
    SaveRunOptions(leads ? RunValues(options, own) : CheckpointValues{}, contents);
    contents.load_values = [&first_step,
                            check = std::move(contents.load_values)](const LoadedValues& loaded) {
      first_step = loaded.step;
      return check(loaded);
    };
    DG_ASSIGN_OR_RETURN(part, CheckpointPart::Create(worker.get(), std::move(contents)));
  }
  // Before the others may call, so that each call is in the traces of both.
  DG_RETURN_IF_ERROR(trace.Start(*worker));
  DG_RETURN_IF_ERROR(worker->Barrier(absl::Now() + options.timeout));
  std::unique_ptr<PipelineTextLearner> learner;
  if (leads_replica) {
    DG_ASSIGN_OR_RETURN(learner, PipelineTextLearner::Create(worker.get(), own, *server));
  }
  // When all have what worker 0 may have loaded.
  const auto train = [&](const TextTraining::Save& save) -> absl::Status {
    DG_RETURN_IF_ERROR(worker->Barrier(absl::Now() + options.timeout));
    if (!leads_replica) return absl::OkStatus();
    if (options.resume) DG_RETURN_IF_ERROR(training->Resume(first_step));
    return training->Run(*learner, save);
  };
  const auto resume = [](int64_t) { return absl::OkStatus(); };  // each worker does, in `train`
  const absl::Status trained =
      leads ? TrainFromCheckpoints(worker.get(), options, resume, train) : train(nullptr);
  // A replica that is interrupted is needed until the checkpoint is saved.
  const bool is_interrupted = absl::IsCancelled(trained) && learner->interrupted();
  if (!trained.ok() && !is_interrupted) return trained;
  DG_RETURN_IF_ERROR(worker->Shutdown());
  DG_RETURN_IF_ERROR(trace.Finish(*worker));
  return trained;
}

int Main(int argc, char** argv) {
  TransformerOptions own;
  std::optional<Text> text;
  CommandLine line = TransformerCommandLine(&own);
  line.check = [&, fits = line.check](Options& options) -> absl::Status {
    DG_RETURN_IF_ERROR(fits(options));
    DG_RETURN_IF_ERROR(CheckCheckpointFolder(options));
    DG_ASSIGN_OR_RETURN(text, Text::Load(options.data));
    own.shape.tokens = static_cast<int64_t>(text->alphabet().size());
    return TextTraining::CheckText(own, *text);
  };
  return RunProgram(argc, argv, line,
                    {[&](const Options& options) { return TrainAlone(options, own, *text); },
                     [&](const Options& options, const JobPlace& place) {
                       return TrainOnWorker(options, own, *text, place);
                     }});
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
