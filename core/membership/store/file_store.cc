// Appends entries to the file under a lock, and reads what others have appended.
#include "core/membership/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/base/descriptors.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/membership/backoff.h"
#include "core/membership/store/store_errors.h"

namespace distgrad {
namespace {

// The file: this, where its last whole entry ends (64 bits), and then entries, each a key and a
// value with their lengths (32 bits). Entries are only added; of one key the last counts. An entry
// of the empty key says of the key that is its value that it is deleted. The end is written after
// the entry, so one that was not finished is behind it and does not count.
constexpr absl::string_view kMagic = "dgstore2";
constexpr uint64_t kHeaderBytes = 16;
constexpr uint64_t kMaxFile = 1 << 30;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);  // and with it goes the lock
  }

  int fd() const { return fd_; }

  // Locks it for writing or for reading together with others.
  absl::Status Lock(bool for_writing, Deadline deadline) {
    Backoff backoff(deadline);
    while (flock(fd_, (for_writing ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return absl::ErrnoToStatus(errno, "flock");
      if (!backoff.Sleep()) return absl::DeadlineExceededError("another process keeps it locked");
    }
    return absl::OkStatus();
  }

  absl::Status Read(uint64_t offset, char* data, size_t size) {
    while (size > 0) {
      const ssize_t n = pread(fd_, data, size, static_cast<off_t>(offset));
      if (n == 0) return absl::UnavailableError("it is shorter than it should be");
      if (n < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "read");
      if (n > 0) Advance(n, &offset, &data, &size);
    }
    return absl::OkStatus();
  }
  absl::Status Write(uint64_t offset, absl::string_view bytes) {
    const char* data = bytes.data();
    size_t size = bytes.size();
    while (size > 0) {
      const ssize_t n = pwrite(fd_, data, size, static_cast<off_t>(offset));
      if (n < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "write");
      if (n > 0) Advance(n, &offset, &data, &size);
    }
    return absl::OkStatus();
  }

 private:
  template <typename Char>
  static void Advance(ssize_t n, uint64_t* offset, Char** data, size_t* size) {
    *offset += n;
    *data += n;
    *size -= n;
  }

  int fd_;
};

// Thread-safe.
class FileStore final : public Store {
 public:
  FileStore(std::string path, absl::Duration patience, dev_t device, ino_t inode)
      : path_(std::move(path)), patience_(patience), device_(device), inode_(inode) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    return WithFile(/*for_writing=*/true, deadline,
                    [&](File& file)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return Append(file, key, value); });
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    int64_t sum = 0;
    bool is_counter = true;
    DG_RETURN_IF_ERROR(WithFile(
        /*for_writing=*/true, deadline, [&](File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
          const auto before = values_.find(key);
          is_counter = before == values_.end() || absl::SimpleAtoi(before->second, &sum);
          if (!is_counter || (amount == 0 && before != values_.end())) return absl::OkStatus();
          sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(amount));
          return Append(file, key, absl::StrCat(sum));
        }));
    if (!is_counter) return NotACounter(key);
    return sum;
  }

  absl::Status Delete(const std::string& key, Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    return WithFile(/*for_writing=*/true, deadline,
                    [&](File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                      return values_.count(key) == 0 ? absl::OkStatus() : Append(file, "", key);
                    });
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckKeys(keys));
    std::vector<Value> values;
    DG_RETURN_IF_ERROR(
        WithFile(/*for_writing=*/false, deadline, [&](File&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
          for (const std::string& key : keys) {
            const auto found = values_.find(key);
            values.push_back(found == values_.end() ? Value() : Value(found->second));
          }
          return absl::OkStatus();
        }));
    return values;
  }

 private:
  // Runs `fn` with the file open and locked, and all of it read.
  absl::Status WithFile(bool for_writing, Deadline deadline,
                        absl::FunctionRef<absl::Status(File&)> fn) ABSL_LOCKS_EXCLUDED(mu_) {
    const auto run = [&]() -> absl::Status {
      DG_ASSIGN_OR_RETURN(File file, Open(for_writing, deadline));
      absl::MutexLock lock(&mu_);
      DG_RETURN_IF_ERROR(CatchUp(file));
      return fn(file);
    };
    return Annotate(run(), absl::StrCat("the store's file \"", path_, "\""));
  }

  // Opens it anew each time: so it shows when it is deleted. Somebody who holds the lock is
  // waited for beyond a deadline in the past, but not for ever.
  absl::StatusOr<File> Open(bool for_writing, Deadline deadline) {
    File file(open(path_.c_str(), O_RDWR | O_CLOEXEC));
    if (file.fd() < 0) {
      const absl::Status why = ErrnoStatus(errno, "open");
      // That is this process's own trouble, and passes.
      return absl::IsResourceExhausted(why) ? why : absl::UnavailableError(std::strerror(errno));
    }
    struct stat info = {};
    if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
    if (info.st_dev != device_ || info.st_ino != inode_) {
      return absl::UnavailableError("it was replaced by another");
    }
    DG_RETURN_IF_ERROR(
        file.Lock(for_writing, std::min(Deadline::After(patience_),
                                        std::max(deadline, Deadline::After(absl::Seconds(1))))));
    return file;
  }

  // Reads what was added since the last time.
  absl::Status CatchUp(File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    uint64_t end = 0;
    DG_RETURN_IF_ERROR(file.Read(kMagic.size(), reinterpret_cast<char*>(&end), sizeof(end)));
    struct stat info = {};
    if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
    const absl::Status damaged = absl::UnavailableError("it is damaged");
    if (end < end_ || end > static_cast<uint64_t>(info.st_size) || end > kMaxFile) return damaged;
    std::string bytes(end - end_, '\0');
    DG_RETURN_IF_ERROR(file.Read(end_, bytes.data(), bytes.size()));
    WireReader reader(bytes);
    while (reader.ok() && reader.remaining() > 0) {
      const absl::string_view key = reader.Bytes();
      const absl::string_view value = reader.Bytes();
      const bool is_deletion = key.empty();
      if (!reader.ok() || !(is_deletion ? CheckEntry(value, "") : CheckEntry(key, value)).ok()) {
        return damaged;
      }
      Apply(std::string(key), std::string(value));
    }
    end_ = end;
    return absl::OkStatus();
  }

  absl::Status Append(File& file, const std::string& key, const std::string& value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::string entry;
    WireWriter writer(&entry);
    writer.Bytes(key);
    writer.Bytes(value);
    DG_RETURN_IF_ERROR(file.Write(end_, entry));
    const uint64_t end = end_ + entry.size();
    DG_RETURN_IF_ERROR(
        file.Write(kMagic.size(), absl::string_view(reinterpret_cast<const char*>(&end), 8)));
    Apply(key, value);
    end_ = end;  // not before: what there was no memory for is read from the file by the next call
    return absl::OkStatus();
  }

  // Either happens or, where there is no memory for it, does not.
  void Apply(const std::string& key, const std::string& value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (key.empty()) {
      values_.erase(value);
    } else {
      values_.insert_or_assign(key, std::string(value));
    }
  }

  // Constant after construction.
  const std::string path_;
  const absl::Duration patience_;
  const dev_t device_;
  const ino_t inode_;

  absl::Mutex mu_;
  uint64_t end_ ABSL_GUARDED_BY(mu_) = kHeaderBytes;  // of what was read
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

// Writes the header of a file that is empty; checks that of another.
absl::Status Begin(File& file, absl::Duration patience) {
  DG_RETURN_IF_ERROR(file.Lock(/*for_writing=*/true, Deadline::After(patience)));
  struct stat info = {};
  if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
  if (info.st_size == 0) {
    std::string header(kMagic);
    WireWriter(&header).U64(kHeaderBytes);
    return file.Write(0, header);
  }
  char magic[kMagic.size()];
  if (static_cast<uint64_t>(info.st_size) >= kHeaderBytes) {
    DG_RETURN_IF_ERROR(file.Read(0, magic, sizeof(magic)));
    if (absl::string_view(magic, sizeof(magic)) == kMagic) return absl::OkStatus();
  }
  return absl::InvalidArgumentError("it holds something else than a store");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> NewFileStore(const std::string& path,
                                                    absl::Duration patience) {
  File file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (file.fd() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot open the store's file \"", path, "\": ", std::strerror(errno)));
  }
  DG_RETURN_IF_ERROR(
      Annotate(Begin(file, patience), absl::StrCat("the store's file \"", path, "\"")));
  struct stat info = {};
  if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
  return std::make_unique<FileStore>(path, patience, info.st_dev, info.st_ino);
}

}  // namespace distgrad
