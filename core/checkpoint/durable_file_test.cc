// Crashes and errors at every system call of a write, and what is on the disk afterwards.
#include "core/checkpoint/durable_file.h"

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;

// Every call in its order, of which one fails or does not return.
class FaultyCalls final : public FileCalls {
 public:
  enum class Fault { kNone, kError, kKill };

  FaultyCalls() = default;
  // The call number `at` fails with `error`, or the process dies before it.
  FaultyCalls(int at, Fault fault, int error = EIO) : at_(at), fault_(fault), error_(error) {}

  // At most 1,000 bytes a call: the operating system may take less than it is given.
  ssize_t Write(int fd, const void* data, size_t size) override {
    return Fails("write") ? -1 : FileCalls::Write(fd, data, std::min<size_t>(size, 1000));
  }
  int Fsync(int fd) override { return Fails("fsync") ? -1 : FileCalls::Fsync(fd); }
  int Renameat(int folder, const char* from, const char* to) override {
    return Fails("rename") ? -1 : FileCalls::Renameat(folder, from, to);
  }

  const std::vector<std::string>& calls() const { return calls_; }

 private:
  bool Fails(const char* name) {
    calls_.push_back(name);
    if (fault_ == Fault::kNone || static_cast<int>(calls_.size()) != at_ + 1) return false;
    if (fault_ == Fault::kKill) {
      raise(SIGKILL);
    }
    errno = error_;
    return true;
  }

  const int at_ = -1;
  const Fault fault_ = Fault::kNone;
  const int error_ = 0;
  std::vector<std::string> calls_;
};

class DurableFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/durable.XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    path_ = folder_ + "/state";
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::ptrdiff_t Descriptors() {
    const fs::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  }
  absl::Status Save(const std::string& text, FileCalls* calls = nullptr) const {
    absl::StatusOr<std::unique_ptr<DurableFile>> file = DurableFile::Create(path_, calls);
    if (!file.ok()) return file.status();
    // In two, so that the first may have failed before the second.
    const absl::Status first = (*file)->Write(absl::string_view(text).substr(0, text.size() / 2));
    const absl::Status second = (*file)->Write(absl::string_view(text).substr(text.size() / 2));
    if (!first.ok()) {
      EXPECT_EQ(second, first);
    }
    const absl::Status done = (*file)->Commit();
    if (!second.ok()) {
      EXPECT_EQ(done, second);
    }
    return done;
  }

  std::string folder_, path_;
  const std::string old_ = std::string(5000, 'o'), new_ = std::string(7000, 'n');
};

TEST_F(DurableFileTest, IsThereWhenItIsCommitted) {
  absl::StatusOr<std::unique_ptr<DurableFile>> file = DurableFile::Create(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE((*file)->Write("one ").ok());
  EXPECT_TRUE((*file)->Write("").ok());
  EXPECT_TRUE((*file)->Write("two").ok());
  EXPECT_EQ(Files(), std::vector<std::string>{".state.tmp"});
  const absl::Status done = (*file)->Commit();
  EXPECT_TRUE(done.ok()) << done;
  EXPECT_EQ(Files(), std::vector<std::string>{"state"});
  EXPECT_EQ(Read(path_), "one two");
  EXPECT_EQ((*file)->Write("more").code(), absl::StatusCode::kFailedPrecondition);
  file->reset();
  EXPECT_EQ(Read(path_), "one two");
  ASSERT_TRUE(Save(new_).ok());
  EXPECT_EQ(Read(path_), new_);
}

// Each allocation fails in turn. A writer that there is no memory for leaves no file and no
// descriptor, and leaves alone that of a writer who is at it.
TEST_F(DurableFileTest, WithoutMemoryNothingIsLeft) {
  const auto fail_each = [&](const std::vector<std::string>& files) {
    int failures = 0;
    for (bool failed = true; failed; ++failures) {
      const auto before = Descriptors();
      FailAllocation(failures);
      try {
        static_cast<void>(DurableFile::Create(path_));
      } catch (const std::bad_alloc&) {
        // What is left then is looked for below.
      }
      failed = FailAllocation(-1);
      ASSERT_EQ(Files(), files) << failures;
      ASSERT_EQ(Descriptors(), before) << failures;
    }
    EXPECT_GT(failures, 3);
  };
  fail_each({});
  absl::StatusOr<std::unique_ptr<DurableFile>> other = DurableFile::Create(path_);
  ASSERT_TRUE(other.ok()) << other.status();
  fail_each({".state.tmp"});
}

TEST_F(DurableFileTest, WithoutCommitNothingWasThere) {
  ASSERT_TRUE(Save(old_).ok());
  {
    absl::StatusOr<std::unique_ptr<DurableFile>> file = DurableFile::Create(path_);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE((*file)->Write(new_).ok());
  }
  EXPECT_EQ(Files(), std::vector<std::string>{"state"});
  EXPECT_EQ(Read(path_), old_);
}

TEST_F(DurableFileTest, BytesComeFirstThenTheNameThenTheFolder) {
  FaultyCalls calls;
  ASSERT_TRUE(Save("x", &calls).ok());
  EXPECT_EQ(calls.calls(), (std::vector<std::string>{"write", "fsync", "rename", "fsync"}));
}

TEST_F(DurableFileTest, EachCallMayFail) {
  FaultyCalls none;
  ASSERT_TRUE(Save(new_, &none).ok());
  const int count = static_cast<int>(none.calls().size());
  ASSERT_GE(count, 5);
  for (int at = 0; at < count; ++at) {
    SCOPED_TRACE(absl::StrCat(at, ": ", none.calls()[at]));
    ASSERT_TRUE(Save(old_).ok());
    FaultyCalls calls(at, FaultyCalls::Fault::kError, ENOSPC);
    const absl::Status saved = Save(new_, &calls);
    EXPECT_EQ(saved.code(), absl::StatusCode::kResourceExhausted) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), path_)) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), none.calls()[at])) << saved;
    EXPECT_TRUE(absl::StrContains(saved.message(), "No space left on device")) << saved;
    EXPECT_EQ(Files(), std::vector<std::string>{"state"});
    // Only when the name has changed can the new one be there.
    EXPECT_EQ(Read(path_), at == count - 1 ? new_ : old_);
  }
}

TEST_F(DurableFileTest, AnInterruptedWriteGoesOnAndAFolderNeedNotSync) {
  FaultyCalls none;
  ASSERT_TRUE(Save(new_, &none).ok());
  const int last = static_cast<int>(none.calls().size()) - 1;
  for (const auto& [at, error] : {std::pair<int, int>{1, EINTR}, {last, EINVAL}}) {
    fs::remove(path_);
    FaultyCalls calls(at, FaultyCalls::Fault::kError, error);
    const absl::Status saved = Save(new_, &calls);
    EXPECT_TRUE(saved.ok()) << saved;
    EXPECT_EQ(Read(path_), new_);
    EXPECT_GE(calls.calls().size(), none.calls().size());
  }
}

// The process is killed before each call in turn: what is there then is whole, and the next writer
// cleans up.
TEST_F(DurableFileTest, ACrashAtAnyCallLeavesTheOldOrTheNew) {
  FaultyCalls none;
  ASSERT_TRUE(Save(new_, &none).ok());
  const int count = static_cast<int>(none.calls().size());
  for (int at = 0; at < count; ++at) {
    SCOPED_TRACE(absl::StrCat(at, ": ", none.calls()[at]));
    ASSERT_TRUE(Save(old_).ok());
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      FaultyCalls calls(at, FaultyCalls::Fault::kKill);
      Save(new_, &calls).IgnoreError();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(Read(path_), at == count - 1 ? new_ : old_);
    const absl::Status saved = Save("next");
    EXPECT_TRUE(saved.ok()) << saved;
    EXPECT_EQ(Read(path_), "next") << "something of the temporary file is left in it";
    EXPECT_EQ(Files(), std::vector<std::string>{"state"});
  }
}

TEST_F(DurableFileTest, TwoWritersOfOneNameDoNotMix) {
  absl::StatusOr<std::unique_ptr<DurableFile>> first = DurableFile::Create(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE((*first)->Write("first").ok());
  const absl::Status second = Save("second");
  EXPECT_EQ(second.code(), absl::StatusCode::kAborted) << second;
  EXPECT_TRUE(absl::StrContains(second.message(), path_)) << second;
  EXPECT_TRUE((*first)->Commit().ok());
  EXPECT_EQ(Read(path_), "first");
  EXPECT_TRUE(Save("second").ok());
}

// What a program forks while it writes may live longer than the program.
TEST_F(DurableFileTest, AForkedChildKeepsNoLock) {
  int ready[2], over[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(over), 0);
  const pid_t writer = fork();
  ASSERT_GE(writer, 0);
  if (writer == 0) {
    close(over[1]);
    const auto file = DurableFile::Create(path_);
    const pid_t child = fork();
    const char said = file.ok() && child >= 0 ? 'y' : 'n';
    if (write(ready[1], &said, 1) != 1) _exit(1);
    char none = 0;
    if (child == 0) _exit(read(over[0], &none, 1) == 0 ? 0 : 1);
    while (true) pause();
  }
  for (int i = 0; i < 2; ++i) {
    char said = 0;
    ASSERT_EQ(read(ready[0], &said, 1), 1);
    EXPECT_EQ(said, 'y');
  }
  EXPECT_EQ(Save(new_).code(), absl::StatusCode::kAborted);
  kill(writer, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(writer, &status, 0), writer);
  const absl::Status saved = Save(new_);
  EXPECT_TRUE(saved.ok()) << saved;
  for (const int fd : {ready[0], ready[1], over[0], over[1]}) close(fd);
}

// Nor does its copy remove what its parent writes.
TEST_F(DurableFileTest, AForkedChildsCopyIsOfNoEffect) {
  absl::StatusOr<std::unique_ptr<DurableFile>> file = DurableFile::Create(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool may_write = (*file)->Write("child").ok();
    *file = nullptr;
    _exit(may_write ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child may write";
  EXPECT_EQ(Save(new_).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE((*file)->Write("parent").ok());
  EXPECT_TRUE((*file)->Commit().ok());
  EXPECT_EQ(Read(path_), "parent");
}

TEST_F(DurableFileTest, TheKernelsOwnRefusalIsSaid) {
  ASSERT_TRUE(Save(old_).ok());
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit little = {6000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
  const absl::Status saved = Save(new_);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(absl::StrContains(saved.message(), "File too large")) << saved;
  EXPECT_EQ(Files(), std::vector<std::string>{"state"});
  EXPECT_EQ(Read(path_), old_);
}

TEST_F(DurableFileTest, AFolderMayVanish) {
  absl::StatusOr<std::unique_ptr<DurableFile>> file = DurableFile::Create(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Write(new_).ok());
  fs::remove_all(folder_);
  const absl::Status done = (*file)->Commit();
  EXPECT_EQ(done.code(), absl::StatusCode::kNotFound) << done;
  EXPECT_TRUE(absl::StrContains(done.message(), path_)) << done;
  const absl::Status again = Save(new_);
  EXPECT_EQ(again.code(), absl::StatusCode::kNotFound) << again;
  EXPECT_TRUE(absl::StrContains(again.message(), folder_)) << again;
  EXPECT_TRUE(absl::StrContains(again.message(), "No such file or directory")) << again;
}

// Root may write everywhere, but for a child that gives up what root may do.
TEST_F(DurableFileTest, AFolderMayBeReadOnly) {
  ASSERT_TRUE(Save(old_).ok());
  ASSERT_EQ(chmod(folder_.c_str(), 0555), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    const __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {};
    if (syscall(SYS_capset, &version, none) != 0) _exit(2);
    const absl::Status saved = Save(new_);
    _exit(saved.code() == absl::StatusCode::kPermissionDenied &&
                  absl::StrContains(saved.message(), path_) &&
                  absl::StrContains(saved.message(), "Permission denied")
              ? 0
              : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(Read(path_), old_);
}

TEST_F(DurableFileTest, OnlyAFileIsReplaced) {
  for (const std::string& path : {std::string(), std::string("/"), folder_ + "/", folder_ + "/..",
                                  path_ + std::string(1, '\0')}) {
    path_ = path;
    EXPECT_EQ(Save("x").code(), absl::StatusCode::kInvalidArgument) << path;
  }
  path_ = folder_ + "/folder";
  fs::create_directory(path_);
  EXPECT_EQ(Save("x").code(), absl::StatusCode::kFailedPrecondition);
  path_ = folder_ + "/pipe";
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(Save("x").code(), absl::StatusCode::kFailedPrecondition);
  // Somebody else's ideas of the temporary file.
  path_ = folder_ + "/link";
  fs::create_symlink(folder_ + "/elsewhere", folder_ + "/.link.tmp");
  EXPECT_FALSE(Save("x").ok());
  path_ = folder_ + "/other";
  ASSERT_EQ(mkfifo((folder_ + "/.other.tmp").c_str(), 0600), 0);
  EXPECT_FALSE(Save("x").ok());
  EXPECT_FALSE(fs::exists(folder_ + "/elsewhere"));
}

TEST_F(DurableFileTest, ASymbolicLinkIsReplacedAndWhatItNamedStays) {
  ASSERT_TRUE(Save(old_).ok());
  const std::string target = path_;
  path_ = folder_ + "/link";
  fs::create_symlink(target, path_);
  ASSERT_TRUE(Save(new_).ok());
  EXPECT_FALSE(fs::is_symlink(path_));
  EXPECT_EQ(Read(path_), new_);
  EXPECT_EQ(Read(target), old_);
}

TEST_F(DurableFileTest, APathMayHaveNoFolder) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  path_ = "here";
  const absl::Status saved = Save("x");
  fs::current_path(before);
  EXPECT_TRUE(saved.ok()) << saved;
  EXPECT_EQ(Read(folder_ + "/here"), "x");
}

}  // namespace
}  // namespace distgrad
