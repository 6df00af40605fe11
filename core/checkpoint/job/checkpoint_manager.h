// Saves and loads the state of a whole job: what all its workers have (part.h), at one step.
// docs/checkpoints.md.
//
//   absl::StatusOr<std::unique_ptr<CheckpointManager>> checkpoints =
//       CheckpointManager::Create(worker.get(), "folder", {.keep = 3});      // on one worker
//   absl::StatusOr<LoadedCheckpoint> loaded = (*checkpoints)->Load();
//   int64_t step = loaded.ok() ? loaded->step : 0;                           // if kNotFound
//   while (...) {
//     ...
//     absl::Status saved = (*checkpoints)->Save(++step);                     // between two steps
//   }
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_MANAGER_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_MANAGER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/checkpoint/durable_file.h"
#include "core/checkpoint/job/part.h"  // IWYU pragma: export
#include "core/worker/worker.h"

namespace distgrad {

struct CheckpointManagerOptions {
  std::string name = {};                  // that of the parts
  std::vector<std::string> workers = {};  // that have a part; empty: all, as of each save and load
  int keep = 3;                           // so many checkpoints stay in the folder, the newest ones
  // Whether a save may lack tensors or optimizers' states that the last checkpoint has (the one
  // that the manager has loaded, until it saves; else the newest), or have those of a worker that
  // was started again since the last save or load and not loaded, or those that a load has left
  // which failed when some of it may have been loaded. Else it is refused: their worker is gone, or
  // a part forgets them, and older checkpoints are removed.
  bool allow_dropping = false;
  // For tests.
  FileCalls* file_calls = nullptr;
};

struct LoadOptions {
  // Which checkpoint; none: the one that was saved last.
  std::optional<int64_t> step = std::nullopt;
  // Whether it is an error, and nothing is loaded, if something is missing, unexpected, of another
  // dtype or shape, or shares memory with what has other values. Else that stays as it is, and is
  // listed; of what shares memory the first by its name is loaded.
  bool strict = true;
  // Whether a damaged checkpoint, or one of which a file is not there, is passed over for the one
  // before it. Else it is an error, as is any damaged manifest unless a step is asked for: it does
  // not say when it was saved. What cannot be read, by what the operating system says, is not
  // damaged, and always an error.
  bool fall_back = false;
  Deadline deadline = Deadline::Never();
};

struct LoadedCheckpoint {
  int64_t step = 0;
  std::string folder;  // what was loaded
  // For people, each with the name of the tensor or the optimizer. All are empty where `strict`.
  std::vector<std::string> missing;     // in the checkpoint
  std::vector<std::string> unexpected;  // in the checkpoint: nobody wants it
  std::vector<std::string> mismatched;
};

// Loads onto these workers what their parts ask for, each tensor by its name from whichever worker
// saved it: so there may be other workers than there were, with other parts of the model, on other
// devices. Waits. All checksums are verified, on all workers, before anything is loaded; if one is
// lost after that, or its load_values fails, some may have been loaded. Nobody may use the tensors
// meanwhile.
//
// kNotFound only if there is no checkpoint, or none of that step; kFailedPrecondition if a worker
// has no part, or another thing is not found; kDataLoss if it is damaged, with the file, the
// tensor, and which step could be loaded instead; kInvalidArgument with a list of what does not
// fit, and if the folder is that of one checkpoint; the error of a load_values, whose origin
// (core/base/origin.h) is a handler; what the operating system says of a file that cannot be read.
// All of them name the worker. It needs no lock: a job may load what another one saves.
absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(Worker* worker, const std::string& folder,
                                                const LoadOptions& options = {},
                                                const CheckpointManagerOptions& of = {});

// Thread-safe; saves and loads come one after the other.
class CheckpointManager {
 public:
  // Makes the folder, if need be; all workers have to see it under this path. It is locked until
  // the manager ends: kAborted, with host and process, if another manager has it. kInvalidArgument
  // if it is the folder of one checkpoint. The worker, which need not have a part, has to outlive
  // the result.
  static absl::StatusOr<std::unique_ptr<CheckpointManager>> Create(
      Worker* worker, const std::string& folder, CheckpointManagerOptions options = {});
  // Waits for what SaveAsync() writes.
  ~CheckpointManager();
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;

  // Saves what all parts have, and waits until it is durable. Nobody may write to the tensors
  // meanwhile, so this is for between two steps. After an error, which names the worker, the
  // checkpoints that were there are still there. kFailedPrecondition, with a list, if it would lack
  // what the last one has, if a worker has come back since this manager's last save or load (also
  // a load that found no checkpoint) and was not loaded, and if its last load has failed when some
  // of it may have been loaded (CheckpointManagerOptions::allow_dropping). The error of a
  // save_values has a handler as its origin.
  absl::Status Save(int64_t step, Deadline deadline = Deadline::Never());

  // Waits until all parts have copied theirs to the memory of the CPU, which is when training may
  // go on; it is then written in the background, and the future done when it is durable. So each
  // worker needs memory for what it saves once more. If the one before is not written yet, waits
  // for that first. The deadline is for all of it, until it is durable. That a save in the
  // background has failed is logged, too.
  absl::StatusOr<Future<Unit>> SaveAsync(int64_t step, Deadline deadline = Deadline::Never());

  // LoadCheckpoint() from this folder.
  absl::StatusOr<LoadedCheckpoint> Load(const LoadOptions& options = {});

 private:
  class Impl;
  explicit CheckpointManager(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_CHECKPOINT_MANAGER_H_
