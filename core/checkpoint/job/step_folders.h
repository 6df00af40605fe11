// The folder of a job's checkpoints, in which each has a folder of its own:
//
//   step-000100/            a whole one: it has a manifest
//   .step-000120.9c3f.../   one that is being written, or that was when its job ended
//   .lock                   who writes
//
// The manifest is written last: from then on the checkpoint is whole, whatever its folder is
// called. The folder's name is then made to say so. No two attempts have a folder of one name, so
// that a worker that is late with what nobody waits for any more finds no folder to write to.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_STEP_FOLDERS_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_STEP_FOLDERS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/checkpoint/durable_file.h"
#include "core/checkpoint/file_lock.h"
#include "core/checkpoint/job/manifest.h"

namespace distgrad {

struct StepFolder {
  std::string path;
  int64_t step = 0;  // as its name says
  // An error: it is damaged, or, unless IsDamage(), it cannot be read.
  absl::StatusOr<Manifest> manifest = absl::UnknownError("");

  // Whether somebody has copied or renamed it: what it has is of another step.
  bool has_other_name() const { return manifest.ok() && manifest->step != step; }
};

// Whether it is the name that the folder of one checkpoint has, whole or not.
bool IsStepName(absl::string_view name);

// The checkpoints of a folder that have a manifest: first those whose manifest is good, the last
// that was saved first, then the others; also while a job saves, removes and renames them.
// kNotFound if there is no such folder; kAborted if the job does so without end.
absl::StatusOr<std::vector<StepFolder>> ListSteps(const std::string& folder);

// A folder that this object alone writes to. For one thread, and not for a forked child, which has
// no lock and begins nothing.
class StepFolders {
 public:
  // By path and sequence: a later save of that step has another one.
  using Damaged = std::set<std::pair<std::string, uint64_t>>;

  // Makes the folder, if need be, and locks it (file_lock.h), until the object ends. Finishes or
  // removes what a crash has left. kAborted if another has the lock, with its host and process.
  // `calls` is as of DurableFile.
  static absl::StatusOr<std::unique_ptr<StepFolders>> Lock(const std::string& folder,
                                                           FileCalls* calls = nullptr);
  StepFolders(const StepFolders&) = delete;
  StepFolders& operator=(const StepFolders&) = delete;

  const std::string& path() const { return folder_; }

  // Lists the checkpoints as they are now. The next Commit() and Prune() go by that, so that the
  // manifests are read once for a save. It lives until then. An error, as of these two, if there is
  // a manifest that cannot be read, and is not damaged: it may be the newest.
  absl::StatusOr<const std::vector<StepFolder>*> List();
  // Makes a folder for a checkpoint; its path. kAlreadyExists if somebody else's folder has the
  // name of that step; kAborted if the lock's file was removed, so that another may have made a new
  // one.
  absl::StatusOr<std::string> Begin(int64_t step);
  // Makes what is in it a whole checkpoint, the newest of all, with the name of its step. Another
  // one of that step is removed. After an error the attempt is removed, unless the error says that
  // it is whole.
  absl::Status Commit(const std::string& attempt, Manifest manifest);
  // Removes it.
  void Abandon(const std::string& attempt);
  // Removes all that are older than the `keep` newest. What cannot be loaded does not count: those
  // that are known to be damaged, and those with another step's name.
  absl::Status Prune(int keep, const Damaged& damaged = {});

 private:
  StepFolders(std::string folder, FileCalls* calls)
      : folder_(std::move(folder)), calls_(calls == nullptr ? &own_calls_ : calls) {}

  absl::Status Open();
  absl::Status Tidy();
  absl::Status WriteManifest(const std::string& attempt, Manifest& manifest);
  absl::Status GiveName(const std::string& attempt, int64_t step, uint64_t sequence);
  absl::Status Remove(const std::string& path);
  absl::Status Sync(const std::string& folder);

  const std::string folder_;
  FileCalls own_calls_;
  FileCalls* const calls_;
  FileLock lock_;
  // As of List(), and then with what was committed.
  std::optional<std::vector<StepFolder>> listed_;
  bool is_committed_ = false;  // since then
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_STEP_FOLDERS_H_
