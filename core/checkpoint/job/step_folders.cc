// Names and removes folders in an order that leaves the last whole checkpoint after a crash at any
// moment.
#include "core/checkpoint/job/step_folders.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/blocking.h"
#include "core/base/descriptors.h"
#include "core/base/random.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kStep = "step-";

std::string StepName(int64_t step) { return absl::StrFormat("%s%06d", kStep, step); }

struct Name {
  int64_t step;
  bool is_attempt;
};

// What a folder's name says, if it is one of ours.
std::optional<Name> ParseName(absl::string_view name) {
  const bool is_attempt = absl::ConsumePrefix(&name, ".");
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  absl::string_view digits = parts[0];
  int64_t step = -1;
  if (!absl::ConsumePrefix(&digits, kStep) || !absl::SimpleAtoi(digits, &step)) return std::nullopt;
  // "step-7", which may be somebody's copy of "step-000007", is not.
  if (step < 0 || parts[0] != StepName(step)) return std::nullopt;
  if (parts.size() != (is_attempt ? 2u : 1u)) return std::nullopt;
  if (is_attempt &&
      (parts[1].size() != 16 || !std::all_of(parts[1].begin(), parts[1].end(), [](char c) {
         return absl::ascii_isxdigit(static_cast<unsigned char>(c));
       }))) {
    return std::nullopt;
  }
  return Name{step, is_attempt};
}

// False only where that is certain: after another error it may be there.
bool MayHaveManifest(const std::string& folder) {
  struct stat is = {};
  return lstat(absl::StrCat(folder, "/", kManifestName).c_str(), &is) == 0 || errno != ENOENT;
}

// kAlreadyExists if something is there that is no checkpoint, and so is not ours to replace.
absl::Status CheckIsOurs(const std::string& path) {
  struct stat is = {};
  if (lstat(path.c_str(), &is) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, absl::StrCat("reading ", path));
  }
  if (S_ISDIR(is.st_mode) && MayHaveManifest(path)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(path, " is there, and is no folder with a ",
                                               kManifestName,
                                               " in it; give the job a folder of its own"));
}

// The folders with names of ours. `changed`: set if one of them was gone when it was looked at.
absl::StatusOr<std::vector<std::pair<std::string, Name>>> Ours(const std::string& folder,
                                                               bool* changed = nullptr) {
  DIR* const open = opendir(folder.c_str());
  if (open == nullptr) {
    return ErrnoStatus(errno, absl::StrCat("reading the folder of checkpoints ", folder));
  }
  const absl::Cleanup close = [open] { closedir(open); };
  std::vector<std::pair<std::string, Name>> ours;
  int error = 0;
  while (true) {
    errno = 0;
    const dirent* const entry = readdir(open);
    // What is not seen counts as not there, so an error is not an end.
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::optional<Name> name = ParseName(entry->d_name);
    if (!name.has_value()) continue;
    const std::string path = absl::StrCat(folder, "/", entry->d_name);
    struct stat is = {};
    if (lstat(path.c_str(), &is) != 0) {
      if (errno == ENOENT) {
        if (changed != nullptr) *changed = true;
        continue;
      }
      error = errno;
      break;
    }
    // A link would lead elsewhere, and be removed as a folder.
    if (S_ISDIR(is.st_mode)) ours.emplace_back(path, *name);
  }
  if (error != 0) {
    return ErrnoStatus(error, absl::StrCat("reading the folder of checkpoints ", folder));
  }
  return ours;
}

std::string ThisProcess() {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  return absl::StrCat("process ", getpid(), " of host ", host[0] != '\0' ? host : "?");
}

}  // namespace

bool IsStepName(absl::string_view name) { return ParseName(name).has_value(); }

absl::StatusOr<std::vector<StepFolder>> ListSteps(const std::string& folder) {
  constexpr int kTries = 100;
  // Most changes are over at once. A file system of the network may show a name for seconds longer.
  constexpr int kTriesAtOnce = 10;
  constexpr absl::Duration kPause = absl::Milliseconds(50);
  std::vector<StepFolder> steps;
  bool changed = true, was_empty = false;
  for (int i = 0; changed; ++i) {
    if (i == kTries) {
      return absl::AbortedError(absl::StrCat("the checkpoints of ", folder,
                                             " change while they are listed, ", kTries, " times"));
    }
    if (i >= kTriesAtOnce) {
      const BlockingScope blocking;
      absl::SleepFor(kPause);
    }
    changed = false;
    DG_ASSIGN_OR_RETURN(const auto ours, Ours(folder, &changed));
    steps.clear();
    for (const auto& [path, name] : ours) {
      absl::StatusOr<Manifest> manifest = ReadManifest(path);
      if (absl::IsNotFound(manifest.status())) {
        // It is not whole yet; or its job has given it its name, or removed it, and what has taken
        // its place may have come after the names were read.
        struct stat is = {};
        if (lstat(path.c_str(), &is) != 0 || MayHaveManifest(path)) changed = true;
        continue;
      }
      steps.push_back({path, name.step, std::move(manifest)});
    }
    // A name that changes while names are read need not be among them.
    if (steps.empty() && !std::exchange(was_empty, true)) changed = true;
  }
  std::sort(steps.begin(), steps.end(), [](const StepFolder& a, const StepFolder& b) {
    if (a.manifest.ok() != b.manifest.ok()) return a.manifest.ok();
    if (a.manifest.ok() && a.manifest->sequence != b.manifest->sequence) {
      return a.manifest->sequence > b.manifest->sequence;
    }
    // A copy of one comes behind it.
    if (a.manifest.ok() && a.has_other_name() != b.has_other_name()) return b.has_other_name();
    return a.step > b.step;
  });
  return steps;
}

absl::StatusOr<std::unique_ptr<StepFolders>> StepFolders::Lock(const std::string& folder,
                                                               FileCalls* calls) {
  std::unique_ptr<StepFolders> folders(new StepFolders(folder, calls));
  DG_RETURN_IF_ERROR(folders->Open());
  DG_RETURN_IF_ERROR(folders->Tidy());
  return folders;
}

absl::Status StepFolders::Open() {
  std::error_code error;
  // Those that get a new name in them, and those above.
  std::vector<fs::path> parents, above;
  for (fs::path at = fs::absolute(folder_); at.has_relative_path(); at = at.parent_path()) {
    (fs::exists(at, error) ? above : parents).push_back(at.parent_path());
  }
  error.clear();
  fs::create_directories(folder_, error);
  if (error) {
    return ErrnoStatus(error.value(), absl::StrCat("making the folder of checkpoints ", folder_));
  }
  for (const fs::path& each : parents) DG_RETURN_IF_ERROR(Sync(each.string()));
  // A run before may have ended between making one and this. Not all need be readable.
  for (const fs::path& each : above) Sync(each.string()).IgnoreError();
  const std::string path = absl::StrCat(folder_, "/.lock");
  const int opened = lock_.Open(AT_FDCWD, path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
  if (opened != 0) return ErrnoStatus(opened, absl::StrCat("opening ", path));
  if (const int locked = lock_.Lock(); locked != 0) {
    if (locked != EWOULDBLOCK) return ErrnoStatus(locked, absl::StrCat("locking ", path));
    char who[400] = {};
    if (pread(lock_.fd(), who, sizeof(who) - 1, 0) < 0) who[0] = '\0';
    const absl::string_view line =
        absl::string_view(who).substr(0, absl::string_view(who).find('\n'));
    return absl::AbortedError(absl::StrCat(
        "another manager writes its checkpoints to ", folder_, ": ", line.empty() ? "?" : line,
        " has the lock. If that is another job, end it, or give this one a folder of its own; if "
        "it is this job, let one of its workers alone have a manager, which saves for all"));
  }
  // For the error above alone, so it need not be durable, nor succeed.
  const std::string who = absl::StrCat(ThisProcess(), "\n");
  if (ftruncate(lock_.fd(), 0) != 0 || pwrite(lock_.fd(), who.data(), who.size(), 0) < 0) errno = 0;
  return absl::OkStatus();
}

absl::Status StepFolders::Tidy() {
  DG_ASSIGN_OR_RETURN(const auto ours, Ours(folder_));
  for (const auto& [path, name] : ours) {
    // Of a save that has not come to its end, or of a removal that has not.
    // A folder that has its name, and no manifest, is somebody else's.
    if (name.is_attempt && !MayHaveManifest(path)) DG_RETURN_IF_ERROR(Remove(path));
  }
  DG_ASSIGN_OR_RETURN(std::vector<StepFolder> steps, ListSteps(folder_));
  std::reverse(steps.begin(), steps.end());  // so that the newest of a step is the last to get it
  for (const StepFolder& each : steps) {
    const bool is_attempt = each.path[folder_.size() + 1] == '.';
    if (!is_attempt || !each.manifest.ok()) continue;
    const absl::Status named = GiveName(each.path, each.step, each.manifest->sequence);
    // It can be loaded as it is called.
    if (!absl::IsAlreadyExists(named)) DG_RETURN_IF_ERROR(named);
  }
  return absl::OkStatus();
}

absl::Status StepFolders::Sync(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("opening ", folder));
  // As DurableFile::Commit() has it.
  const int error = calls_->Fsync(fd) != 0 && errno != EINVAL ? errno : 0;
  close(fd);
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, absl::StrCat("fsync of ", folder));
}

absl::StatusOr<const std::vector<StepFolder>*> StepFolders::List() {
  DG_ASSIGN_OR_RETURN(std::vector<StepFolder> steps, ListSteps(folder_));
  for (const StepFolder& each : steps) {
    const absl::Status& read = each.manifest.status();
    if (!read.ok() && !IsDamage(read)) return read;
  }
  listed_ = std::move(steps);
  is_committed_ = false;
  return &*listed_;
}

absl::StatusOr<std::string> StepFolders::Begin(int64_t step) {
  if (step < 0) return absl::InvalidArgumentError(absl::StrCat("the step is ", step));
  if (std::exchange(is_committed_, false)) listed_.reset();  // it is of the save before
  const std::string lock = absl::StrCat(folder_, "/.lock");
  struct stat mine = {}, there = {};
  if (lock_.fd() < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the lock of ", folder_,
                     " is that of the process which has forked this one, and its alone"));
  }
  if (fstat(lock_.fd(), &mine) != 0 || stat(lock.c_str(), &there) != 0) {
    return ErrnoStatus(errno, absl::StrCat("reading ", lock));
  }
  if (mine.st_ino != there.st_ino || mine.st_dev != there.st_dev) {
    return absl::AbortedError(absl::StrCat(
        lock, " is another file than was locked, so another job may write here; do not remove it"));
  }
  DG_RETURN_IF_ERROR(CheckIsOurs(absl::StrCat(folder_, "/", StepName(step))));
  const std::string path = absl::StrFormat("%s/.%s.%016x", folder_, StepName(step), RandomNumber());
  if (mkdir(path.c_str(), 0777) != 0) return ErrnoStatus(errno, absl::StrCat("making ", path));
  // Before anything in it can count as whole.
  if (absl::Status synced = Sync(folder_); !synced.ok()) {
    Abandon(path);
    return synced;
  }
  return path;
}

absl::Status StepFolders::Commit(const std::string& attempt, Manifest manifest) {
  absl::Status written;
  try {
    written = WriteManifest(attempt, manifest);
  } catch (...) {
    Abandon(attempt);  // no memory for its text, say
    throw;
  }
  if (!written.ok()) {
    Abandon(attempt);
    return written;
  }
  // From here on the folder has this one, whatever comes.
  absl::Cleanup forget = [this] { listed_.reset(); };
  if (absl::Status named = GiveName(attempt, manifest.step, manifest.sequence); !named.ok()) {
    return Annotate(named,
                    absl::StrCat("the checkpoint is whole, but may still be called ", attempt));
  }
  const std::string path = absl::StrCat(folder_, "/", StepName(manifest.step));
  const auto replaced = [&](const StepFolder& each) { return each.path == path; };
  listed_->erase(std::remove_if(listed_->begin(), listed_->end(), replaced), listed_->end());
  listed_->insert(listed_->begin(), StepFolder{path, manifest.step, std::move(manifest)});
  is_committed_ = true;
  std::move(forget).Cancel();
  return absl::OkStatus();
}

absl::Status StepFolders::WriteManifest(const std::string& attempt, Manifest& manifest) {
  if (!listed_.has_value()) DG_RETURN_IF_ERROR(List().status());
  const std::vector<StepFolder>& steps = *listed_;
  manifest.sequence = 1;
  if (!steps.empty() && steps[0].manifest.ok()) {
    const uint64_t last = steps[0].manifest->sequence;
    if (last == std::numeric_limits<uint64_t>::max()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "none can be newer than ", steps[0].path, ", whose sequence is ", last, "; remove it"));
    }
    manifest.sequence = last + 1;
  }
  manifest.time = absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone());
  DG_ASSIGN_OR_RETURN(const std::string text, EncodeManifest(manifest));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<DurableFile> file,
                      DurableFile::Create(absl::StrCat(attempt, "/", kManifestName), calls_));
  DG_RETURN_IF_ERROR(file->Write(text));
  return file->Commit();
}

absl::Status StepFolders::GiveName(const std::string& attempt, int64_t step, uint64_t sequence) {
  const std::string path = absl::StrCat(folder_, "/", StepName(step));
  DG_RETURN_IF_ERROR(CheckIsOurs(path));
  // A save of this step may have failed to name its folder, and a later one not.
  const absl::StatusOr<Manifest> named = ReadManifest(path);
  if (named.ok() && named->sequence > sequence) return Remove(attempt);
  const absl::Status& read = named.status();
  if (!read.ok() && !absl::IsNotFound(read) && !IsDamage(read)) return read;
  DG_RETURN_IF_ERROR(Remove(path));
  if (rename(attempt.c_str(), path.c_str()) != 0) {
    return ErrnoStatus(errno, absl::StrCat("renaming ", attempt, " to ", path));
  }
  return Sync(folder_);
}

absl::Status StepFolders::Remove(const std::string& path) {
  std::string hidden = path;
  const std::string name = path.substr(folder_.size() + 1);
  if (name[0] != '.') {
    // Only what is called like this is removed after a crash.
    hidden = absl::StrFormat("%s/.%s.%016x", folder_, name, RandomNumber());
    if (rename(path.c_str(), hidden.c_str()) != 0) {
      return errno == ENOENT ? absl::OkStatus()
                             : ErrnoStatus(errno, absl::StrCat("renaming ", path));
    }
    // Before it loses its manifest: without one, and with its name, it would be somebody else's.
    DG_RETURN_IF_ERROR(Sync(folder_));
  }
  // First what makes it whole.
  const std::string manifest = absl::StrCat(hidden, "/", kManifestName);
  if (unlink(manifest.c_str()) == 0) {
    DG_RETURN_IF_ERROR(Sync(hidden));
  } else if (errno != ENOENT) {
    return ErrnoStatus(errno, absl::StrCat("removing ", manifest));
  }
  std::error_code error;
  fs::remove_all(hidden, error);
  // A worker that is late may have put a file there since; the next one to tidy finds it.
  if (error && error.value() != ENOTEMPTY) {
    return ErrnoStatus(error.value(), absl::StrCat("removing ", hidden));
  }
  return absl::OkStatus();
}

void StepFolders::Abandon(const std::string& attempt) {
  listed_.reset();
  Remove(attempt).IgnoreError();
}

absl::Status StepFolders::Prune(int keep, const Damaged& damaged) {
  if (!listed_.has_value()) DG_RETURN_IF_ERROR(List().status());
  const std::vector<StepFolder> steps = *std::exchange(listed_, std::nullopt);
  int kept = 0;
  for (const StepFolder& each : steps) {
    if (!each.manifest.ok()) continue;
    if (kept == keep) {
      DG_RETURN_IF_ERROR(Remove(each.path));
    } else if (!each.has_other_name() && damaged.count({each.path, each.manifest->sequence}) == 0) {
      ++kept;
    }
  }
  return absl::OkStatus();
}

}  // namespace distgrad
