// Writes a file in the order that makes it durable: its bytes reach the disk before its name
// changes, and its name before Commit() returns. The folder is held open, so that all of it happens
// in one folder, also if that is moved.
#include "core/checkpoint/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/descriptors.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

// Has the disk begin with the pieces that the last `written` bytes have completed. Else nothing is
// written to it before Commit() asks for all. It is a hint, and errors of the disk are Commit()'s.
void BeginWriteback(int fd, ssize_t written) {
  constexpr off_t kPiece = 8 << 20;
  const off_t end = lseek(fd, 0, SEEK_CUR);
  const off_t from = (end - written) / kPiece * kPiece, to = end / kPiece * kPiece;
  if (end >= written && to > from) sync_file_range(fd, from, to - from, SYNC_FILE_RANGE_WRITE);
}

}  // namespace

ssize_t FileCalls::Write(int fd, const void* data, size_t size) { return write(fd, data, size); }
int FileCalls::Fsync(int fd) { return fsync(fd); }
int FileCalls::Renameat(int folder, const char* from, const char* to) {
  return renameat(folder, from, folder, to);
}

DurableFile::DurableFile(std::string path, FileCalls* calls)
    : path_(std::move(path)), calls_(calls == nullptr ? &own_calls_ : calls) {}

absl::StatusOr<std::unique_ptr<DurableFile>> DurableFile::Create(const std::string& path,
                                                                 FileCalls* calls) {
  std::unique_ptr<DurableFile> file(new DurableFile(path, calls));
  DG_RETURN_IF_ERROR(file->Open());
  return file;
}

DurableFile::~DurableFile() {
  RemoveTemporary();
  if (folder_ >= 0) close(folder_);
}

absl::Status DurableFile::Failed(absl::string_view what) const {
  return ErrnoStatus(errno, absl::StrCat("cannot write ", path_, ": ", what));
}

absl::Status DurableFile::Open() {
  const size_t slash = path_.rfind('/');
  name_ = slash == std::string::npos ? path_ : path_.substr(slash + 1);
  if (name_.empty() || name_ == "." || name_ == ".." || path_.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("\"", path_, "\" is no name of a file"));
  }
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  temporary_ = absl::StrCat(".", name_, ".tmp");
  folder_ = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0) return Failed(absl::StrCat("its folder ", folder));
  // A rename would take the place of a device too.
  struct stat there = {};
  if (fstatat(folder_, name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
      !S_ISREG(there.st_mode) && !S_ISLNK(there.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write ", path_, ": something that is no file has that name"));
  }
  DG_RETURN_IF_ERROR(LockTemporary());
  // What a crash has left.
  if (ftruncate(file_.fd(), 0) != 0) {
    const absl::Status failed = Failed(absl::StrCat("emptying ", temporary_));
    RemoveTemporary();
    return failed;
  }
  return absl::OkStatus();
}

absl::Status DurableFile::LockTemporary() {
  while (true) {
    errno = file_.Open(folder_, temporary_.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
    if (errno != 0) return Failed(absl::StrCat("opening ", temporary_, " beside it"));
    struct stat locked = {}, named = {};
    int error = file_.Lock();
    if (error == 0 && fstat(file_.fd(), &locked) != 0) error = errno;
    if (error != 0 || !S_ISREG(locked.st_mode)) {
      // Before there is a text, which may find no memory: the destructor removes what is open.
      file_.Close();
      if (error == EWOULDBLOCK) {
        return absl::AbortedError(
            absl::StrCat("cannot write ", path_,
                         ": another writer is at it (do two jobs save into one folder?)"));
      }
      if (error != 0) {
        const std::string what = absl::StrCat("locking ", temporary_, " beside it");
        errno = error;
        return Failed(what);
      }
      return absl::FailedPreconditionError(
          absl::StrCat("cannot write ", path_, ": ", temporary_, " beside it is no file"));
    }
    // Since it was opened, another writer may have given it its final name, or removed it.
    if (fstatat(folder_, temporary_.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
        named.st_dev == locked.st_dev && named.st_ino == locked.st_ino) {
      return absl::OkStatus();
    }
  }
}

void DurableFile::RemoveTemporary() {
  if (file_.fd() < 0) return;
  // Before the lock goes: what has this name afterwards is another writer's.
  unlinkat(folder_, temporary_.c_str(), 0);
  file_.Close();
}

absl::Status DurableFile::Write(absl::string_view bytes) {
  while (status_.ok() && !bytes.empty()) {
    const ssize_t written = calls_->Write(file_.fd(), bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(written);
      BeginWriteback(file_.fd(), written);
    } else if (errno != EINTR) {
      status_ = Failed("write");
    }
  }
  return status_;
}

absl::Status DurableFile::Commit() {
  if (status_.ok() && calls_->Fsync(file_.fd()) != 0) status_ = Failed("fsync");
  if (status_.ok() && calls_->Renameat(folder_, temporary_.c_str(), name_.c_str()) != 0) {
    status_ = Failed(absl::StrCat("rename of ", temporary_));
  }
  if (!status_.ok()) {
    RemoveTemporary();
    return status_;
  }
  file_.Close();  // it has no temporary name any more
  if (calls_->Fsync(folder_) != 0 && errno != EINVAL) {
    status_ = ErrnoStatus(
        errno, absl::StrCat(path_,
                            " is there, but fsync of its folder failed, so that a crash of "
                            "the machine may bring back what was there before"));
    return status_;
  }
  status_ = absl::FailedPreconditionError(absl::StrCat(path_, " has been committed"));
  return absl::OkStatus();
}

}  // namespace distgrad
