// Leads the saving and loading of what all workers have.
#include "examples/checkpointing.h"

#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/checkpoint/job/checkpoint_manager.h"
#include "core/checkpoint/job/step_folders.h"

namespace distgrad {

void SaveRunOptions(CheckpointValues options, CheckpointContents& contents) {
  contents.save_values = [options] { return options; };
  contents.load_values = [options =
                              std::move(options)](const LoadedValues& loaded) -> absl::Status {
    for (const auto& [name, value] : options) {
      for (const auto& [worker, values] : loaded.workers) {
        const auto saved = values.find(name);
        if (saved == values.end() || saved->second == value) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("--resume: the checkpoint is of a run with --", name, "=", saved->second));
      }
    }
    return absl::OkStatus();
  };
}

absl::Status CheckCheckpointFolder(const Options& options) {
  if (options.checkpoint.empty() || options.resume) return absl::OkStatus();
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(options.checkpoint);
  // What is wrong with the folder the manager says, on the worker that has it.
  if (!steps.ok() || steps->empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--checkpoint: ", options.checkpoint, " has the checkpoints of another run, which this one ",
      "would remove as it saves its own: go on from them with --resume, or give another folder"));
}

absl::Status TrainFromCheckpoints(
    Worker* worker, const Options& options, absl::FunctionRef<absl::Status(int64_t steps)> resume,
    absl::FunctionRef<absl::Status(const std::function<absl::Status(int64_t steps)>& save)> run) {
  if (options.checkpoint.empty()) return run(nullptr);
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> checkpoints,
                      CheckpointManager::Create(worker, options.checkpoint));
  if (options.resume) {
    const absl::StatusOr<LoadedCheckpoint> loaded = checkpoints->Load();
    if (!loaded.ok() && !absl::IsNotFound(loaded.status())) return loaded.status();
    const std::string where =
        loaded.ok() ? absl::StrCat("going on after step ", loaded->step, ", from ", loaded->folder)
                    : absl::StrCat("there is no checkpoint in ", options.checkpoint,
                                   ": beginning with step 1");
    std::printf("%s\n", where.c_str());
    std::fflush(stdout);
    DG_RETURN_IF_ERROR(resume(loaded.ok() ? loaded->step : 0));
  }
  return run([&](int64_t steps) { return checkpoints->Save(steps); });
}

}  // namespace distgrad
