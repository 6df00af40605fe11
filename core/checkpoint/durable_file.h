// A file that appears under its name once all of it is on the disk, and not before.
//
//   DG_ASSIGN_OR_RETURN(std::unique_ptr<DurableFile> file, DurableFile::Create("folder/name"));
//   DG_RETURN_IF_ERROR(file->Write(some));  // as often as you like
//   DG_RETURN_IF_ERROR(file->Commit());
//
// Until Commit() the bytes go to ".NAME.tmp" in the same folder, which stays locked (file_lock.h)
// while it is written. What a crash leaves of it readers never see, and the next writer of NAME
// takes it over; so there is at most one per name.
#ifndef DISTGRAD_CORE_CHECKPOINT_DURABLE_FILE_H_
#define DISTGRAD_CORE_CHECKPOINT_DURABLE_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/checkpoint/file_lock.h"

namespace distgrad {

// The calls of the operating system that a disk makes fail, under their own names, with their
// results and errno. Tests inject faults through it. Thread-safe.
class FileCalls {
 public:
  virtual ~FileCalls() = default;
  virtual ssize_t Write(int fd, const void* data, size_t size);
  virtual int Fsync(int fd);
  virtual int Renameat(int folder, const char* from, const char* to);
};

// A file while it is written. For one thread, and not for a forked child, which cannot write to it.
class DurableFile {
 public:
  // Opens the file. kAborted if another DurableFile is writing under that name, in any process;
  // kInvalidArgument if the path names no file, and kFailedPrecondition if something that is no
  // file has that name. `calls` must outlive the result; null stands for the operating system's
  // own.
  static absl::StatusOr<std::unique_ptr<DurableFile>> Create(const std::string& path,
                                                             FileCalls* calls = nullptr);
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;
  // Leaves nothing there without Commit().
  ~DurableFile();

  // Appends. The first error, which names the path and says what the operating system says, is also
  // that of all that follows.
  absl::Status Write(absl::string_view bytes);

  // Brings what was written to the disk and then puts it under the name, in the place of the file
  // or the symbolic link that may be there. To be called once. After an error what had that name
  // still has it, unless the error says that the file is there and only the folder is not on the
  // disk. (File systems that cannot sync a folder answer EINVAL, which is taken for success.)
  absl::Status Commit();

 private:
  DurableFile(std::string path, FileCalls* calls);

  absl::Status Open();
  absl::Status LockTemporary();
  // The error of a call that has just failed, with errno.
  absl::Status Failed(absl::string_view what) const;
  void RemoveTemporary();

  const std::string path_;
  std::string name_;       // the last part of the path
  std::string temporary_;  // beside it
  FileCalls own_calls_;
  FileCalls* const calls_;
  int folder_ = -1;
  FileLock file_;  // the temporary file
  absl::Status status_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_DURABLE_FILE_H_
