// Appends entries to the file under a lock, and reads what others have appended; copies those that
// count to another place in it when most do not.
#include "core/membership/store/file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/base/descriptors.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/membership/backoff.h"
#include "core/membership/store/store_errors.h"

namespace distgrad {
namespace {

// The file: this, a header that says where its log is, and somewhere behind that the log. It has
// entries, each a key and a value with their lengths (32 bits); of one key the last counts. An
// entry of the empty key says of the key that is its value that it is deleted. The log's end is
// written after the entry, so one that was not finished is behind it and does not count.
constexpr absl::string_view kMagic = "dgstore3";

// Where the log is. When most of it does not count any more, what does is copied to a part of the
// file that has no log, and then this says so, with another generation: whoever has read the former
// log reads the new one from its beginning. It is within a page, so no process is killed halfway in
// writing it; one that is killed before has changed nothing.
struct Header {
  uint64_t id = 0;  // of the file, at random: another one at the same path is another store
  uint64_t generation = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};
constexpr uint64_t kHeaderBytes = kMagic.size() + sizeof(Header);

absl::string_view BytesOf(const Header& header) {
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

// A log that is shorter is not copied; nor is one whose copy has failed before it is longer by so
// much.
constexpr uint64_t kMinCopied = 1 << 20;
// No file is longer. Where all that counts takes n bytes a log is up to 2n long, and one entry
// more; and it is copied to behind itself only where it begins before n. So that copy begins before
// 3n, and ends, when others have added to it, before 5n.
constexpr uint64_t kMaxFile = 6 * kMaxFileStoreBytes;
// So much is read at once: an entry, at least.
constexpr uint64_t kReadBytes = 2 * kMaxStoreValue;
static_assert(kReadBytes > 2 * sizeof(uint32_t) + kMaxStoreKey + kMaxStoreValue);

void AppendEntry(absl::string_view key, absl::string_view value, std::string* out) {
  WireWriter writer(out);
  writer.Bytes(key);
  writer.Bytes(value);
}
uint64_t EntryBytes(absl::string_view key, absl::string_view value) {
  return 2 * sizeof(uint32_t) + key.size() + value.size();
}

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;
  ~File() {
    if (fd_ < 0) return;
    flock(fd_, LOCK_UN);  // a child that was forked meanwhile may have the descriptor, too
    close(fd_);
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

  // Waits until what was written before is where a machine that stops does not lose it.
  absl::Status Flush() {
    return fdatasync(fd_) == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "fdatasync");
  }
  // Gives back what is behind; where the system does not, it stays until the next time.
  void CutAt(uint64_t end) {
    [[maybe_unused]] const int n = ftruncate(fd_, static_cast<off_t>(end));
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

// Returns nothing where the file is no store.
absl::StatusOr<std::optional<Header>> ReadHeader(File& file) {
  char bytes[kHeaderBytes];
  DG_RETURN_IF_ERROR(file.Read(0, bytes, sizeof(bytes)));
  if (absl::string_view(bytes, kMagic.size()) != kMagic) return std::nullopt;
  Header header;
  std::memcpy(&header, bytes + kMagic.size(), sizeof(header));
  return header;
}

// Thread-safe.
class FileStore final : public Store {
 public:
  FileStore(std::string path, absl::Duration patience, uint64_t max_bytes, uint64_t id)
      : path_(std::move(path)), patience_(patience), max_bytes_(max_bytes), id_(id) {}

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
    DG_RETURN_IF_ERROR(
        file.Lock(for_writing, std::min(Deadline::After(patience_),
                                        std::max(deadline, Deadline::After(absl::Seconds(1))))));
    return file;
  }

  // Reads what was added since the last time, or a new log.
  absl::Status CatchUp(File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    DG_ASSIGN_OR_RETURN(const std::optional<Header> now, ReadHeader(file));
    if (!now.has_value() || now->id != id_) {
      return absl::UnavailableError("it was replaced by another");
    }
    struct stat info = {};
    if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
    if (now->generation != log_.generation) {
      values_.clear();
      live_bytes_ = 0;
      log_ = {id_, now->generation, now->begin, now->begin};
    }
    const absl::Status damaged = absl::UnavailableError("it is damaged");
    if (now->begin != log_.begin || now->begin < kHeaderBytes || now->end < log_.end ||
        now->end > static_cast<uint64_t>(info.st_size) || now->end > kMaxFile) {
      return damaged;
    }
    std::string bytes;
    while (log_.end < now->end) {
      bytes.resize(std::min(now->end - log_.end, kReadBytes));
      DG_RETURN_IF_ERROR(file.Read(log_.end, bytes.data(), bytes.size()));
      const uint64_t begin = log_.end;
      for (WireReader reader(bytes); reader.remaining() > 0;) {
        const absl::string_view key = reader.Bytes();
        const absl::string_view value = reader.Bytes();
        if (!reader.ok()) break;  // the rest of it is in the next piece
        const bool is_deletion = key.empty();
        if (!(is_deletion ? CheckEntry(value, "") : CheckEntry(key, value)).ok()) return damaged;
        Apply(std::string(key), std::string(value));
        log_.end += EntryBytes(key, value);
      }
      if (log_.end == begin || live_bytes_ > kMaxFileStoreBytes) return damaged;
    }
    return absl::OkStatus();
  }

  // A key that is deleted needs no room. Nothing is flushed, for which every call would wait: where
  // the machine of the disk stops, the header may say more than what is there of the log, and then
  // the file is damaged.
  absl::Status Append(File& file, const std::string& key, const std::string& value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!key.empty() && live_bytes_ - LiveBytesOf(key) + EntryBytes(key, value) > max_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("it is full: its entries may take ", max_bytes_, " bytes"));
    }
    if (log_.end - log_.begin > std::max(kMinCopied, 2 * live_bytes_) && log_.end >= copied_from_) {
      Compact(file);
    }
    std::string entry;
    AppendEntry(key, value, &entry);
    if (log_.end + entry.size() > kMaxFile) {
      return absl::ResourceExhaustedError("it is full, and what counts of it cannot be copied");
    }
    DG_RETURN_IF_ERROR(file.Write(log_.end, entry));
    const Header longer = {id_, log_.generation, log_.begin, log_.end + entry.size()};
    DG_RETURN_IF_ERROR(file.Write(kMagic.size(), BytesOf(longer)));
    Apply(key, value);
    log_ = longer;  // after Apply(): what that has no memory for is read by the next call
    return absl::OkStatus();
  }

  // Drops what does not count, if there is room and memory for a copy of the rest; tried again
  // later, where there is none.
  void Compact(File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const uint64_t end = log_.end;
    bool is_copied = false;
    try {
      is_copied = Copy(file).ok();
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as where there is no room
    }
    copied_from_ = is_copied ? 0 : end + kMinCopied;
  }

  // Copies what counts to before the log, if there is room, and else to behind it. Then what is
  // behind both is given back. The copy is durable before its header is written, and that before
  // the log which the former header is of is cut off: a machine that stops in here leaves one of
  // the two, with its log.
  absl::Status Copy(File& file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::string entries;
    entries.reserve(live_bytes_);
    for (const auto& [key, value] : values_) AppendEntry(key, value, &entries);
    const bool fits = kHeaderBytes + entries.size() <= log_.begin;
    const uint64_t begin = fits ? kHeaderBytes : log_.end;
    absl::Status written = file.Write(begin, entries);
    if (written.ok()) written = file.Flush();
    if (!written.ok()) {
      file.CutAt(log_.end);
      return written;
    }
    const Header copy = {id_, log_.generation + 1, begin, begin + entries.size()};
    DG_RETURN_IF_ERROR(file.Write(kMagic.size(), BytesOf(copy)));
    log_ = copy;
    if (file.Flush().ok()) file.CutAt(copy.end);
    return absl::OkStatus();
  }

  // Either happens or, where there is no memory for it, does not.
  void Apply(const std::string& key, const std::string& value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const uint64_t before = LiveBytesOf(key.empty() ? value : key);
    if (key.empty()) {
      values_.erase(value);
    } else {
      values_.insert_or_assign(key, std::string(value));
      live_bytes_ += EntryBytes(key, value);
    }
    live_bytes_ -= before;
  }

  // Returns what the key's entry takes; 0 if it is not there.
  uint64_t LiveBytesOf(const std::string& key) ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const auto found = values_.find(key);
    return found == values_.end() ? 0 : EntryBytes(key, found->second);
  }

  // Constant after construction.
  const std::string path_;
  const absl::Duration patience_;
  const uint64_t max_bytes_;
  const uint64_t id_;  // Header::id

  absl::Mutex mu_;
  Header log_ ABSL_GUARDED_BY(mu_);  // as far as it was read; of generation 0 there is none
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
  uint64_t live_bytes_ ABSL_GUARDED_BY(mu_) = 0;   // of these, as entries
  uint64_t copied_from_ ABSL_GUARDED_BY(mu_) = 0;  // no log that ends before this is copied
};

// Writes the header of a file that is empty; checks that of another. Returns its id.
absl::StatusOr<uint64_t> Begin(File& file, absl::Duration patience) {
  DG_RETURN_IF_ERROR(file.Lock(/*for_writing=*/true, Deadline::After(patience)));
  struct stat info = {};
  if (fstat(file.fd(), &info) != 0) return absl::ErrnoToStatus(errno, "stat");
  if (info.st_size == 0) {
    const Header empty = {RandomNumber(), 1, kHeaderBytes, kHeaderBytes};
    DG_RETURN_IF_ERROR(file.Write(0, absl::StrCat(kMagic, BytesOf(empty))));
    return empty.id;
  }
  std::optional<Header> header;
  if (static_cast<uint64_t>(info.st_size) >= kHeaderBytes) {
    DG_ASSIGN_OR_RETURN(header, ReadHeader(file));
  }
  if (header.has_value()) return header->id;
  return absl::InvalidArgumentError(
      "it holds something else than a store, or one of another version of distgrad");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> NewFileStore(const std::string& path,
                                                    absl::Duration patience, uint64_t max_bytes) {
  File file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (file.fd() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot open the store's file \"", path, "\": ", std::strerror(errno)));
  }
  const absl::StatusOr<uint64_t> id = Begin(file, patience);
  if (!id.ok()) return Annotate(id.status(), absl::StrCat("the store's file \"", path, "\""));
  return std::make_unique<FileStore>(path, patience, max_bytes, *id);
}

}  // namespace distgrad
