// Which checkpoints are there after saves, crashes, removals, and what others put beside them.
#include "core/checkpoint/job/step_folders.h"

#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/blocking.h"
#include "core/checkpoint/job/checkpoint_folder.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

class StepFoldersTest : public CheckpointFolderTest {
 protected:
  std::unique_ptr<StepFolders> Lock() {
    absl::StatusOr<std::unique_ptr<StepFolders>> folders = StepFolders::Lock(folder_);
    EXPECT_TRUE(folders.ok()) << folders.status();
    return *std::move(folders);
  }
  static void Save(StepFolders& folders, int64_t step) {
    const absl::StatusOr<std::string> attempt = folders.Begin(step);
    ASSERT_TRUE(attempt.ok()) << attempt.status();
    std::ofstream(absl::StrCat(*attempt, "/file")) << step;
    const absl::Status committed = folders.Commit(*attempt, {step, 0, "", {}});
    ASSERT_TRUE(committed.ok()) << committed;
  }
  // The steps that can be loaded, the newest first.
  std::vector<int64_t> Steps() const {
    std::vector<int64_t> steps;
    const absl::StatusOr<std::vector<StepFolder>> listed = ListSteps(folder_);
    for (const StepFolder& each : *listed) {
      if (each.manifest.ok()) steps.push_back(each.manifest->step);
    }
    return steps;
  }
};

TEST_F(StepFoldersTest, ACheckpointIsThereOnceItIsCommitted) {
  const auto folders = Lock();
  Save(*folders, 100);
  const absl::StatusOr<std::string> attempt = folders->Begin(120);
  ASSERT_TRUE(attempt.ok()) << attempt.status();
  EXPECT_EQ(Steps(), std::vector<int64_t>{100});
  ASSERT_TRUE(folders->Commit(*attempt, {120, 0, "", {}}).ok());
  EXPECT_EQ(Steps(), (std::vector<int64_t>{120, 100}));
  EXPECT_EQ(Names(), (Strings{"step-000100", "step-000120"}));
  // Whoever is late finds no folder.
  EXPECT_FALSE(fs::exists(*attempt));
}

TEST_F(StepFoldersTest, TheNewestIsTheOneThatWasSavedLast) {
  auto folders = Lock();
  for (const int64_t step : {100, 300, 200, 1'000'000'000}) Save(*folders, step);
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1'000'000'000, 200, 300, 100}));
  Save(*folders, 300);  // in the place of the other one
  EXPECT_EQ(Steps(), (std::vector<int64_t>{300, 1'000'000'000, 200, 100}));
  ASSERT_TRUE(folders->Prune(2).ok());
  EXPECT_EQ(Steps(), (std::vector<int64_t>{300, 1'000'000'000}));
  EXPECT_EQ(Names(), (Strings{"step-000300", "step-1000000000"}));
}

// Whoever gets nothing may begin at step 0.
TEST_F(StepFoldersTest, WhoListsWhileOthersSaveMissesNone) {
  auto folders = Lock();
  Save(*folders, 1);
  std::atomic<uint64_t> saved{1};  // the sequence of the last one
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    for (uint64_t i = 0; i < 30; ++i) {
      // Another one of a step that is there already, and one that takes the place of all others.
      Save(*folders, static_cast<int64_t>(i / 2) + 2);
      saved = i + 2;
      EXPECT_EQ(folders->Prune(1), absl::OkStatus());
    }
    is_over = true;
  });
  int listed = 0, aborted = 0;
  for (bool was_over = false; !was_over;) {
    was_over = is_over;
    const uint64_t before = saved;
    const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder_);
    if (!steps.ok()) {
      // That it is in one's way it may say.
      EXPECT_EQ(steps.status().code(), absl::StatusCode::kAborted) << steps.status();
      ++aborted;
      continue;
    }
    ++listed;
    const bool has_one = !steps->empty() && (*steps)[0].manifest.ok();
    EXPECT_TRUE(has_one);
    EXPECT_GE(has_one ? (*steps)[0].manifest->sequence : 0, before);
  }
  other.join();
  EXPECT_GT(listed, aborted) << "it says so only after many tries";
}

// As where a folder loses its manifest to a removal, and another with one gets its name, before it
// is looked at again.
TEST_F(StepFoldersTest, AManifestThatIsThereAfterAllIsRead) {
  Save(*Lock(), 1);
  const std::string manifest = folder_ + "/step-000001/manifest.json";
  fs::rename(manifest, manifest + ".whole");
  fs::create_symlink("nothing", manifest);  // it is there, and opening it says ENOENT
  std::atomic<bool> has_begun{false};
  std::thread other([&] {
    while (!has_begun) std::this_thread::yield();
    fs::rename(manifest + ".whole", manifest);
  });
  absl::StatusOr<std::vector<StepFolder>> steps;
  do {
    has_begun = true;
    steps = ListSteps(folder_);
  } while (absl::IsAborted(steps.status()));
  other.join();
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(steps->size(), 1u);
}

// A pool gives the place of a thread that waits to another one.
TEST_F(StepFoldersTest, WhoWaitsForChangesSaysSo) {
  struct Pool final : Blockable {
    explicit Pool(std::string manifest) : manifest(std::move(manifest)) {}
    void OnBlocked() override {
      if (blocked++ == 0) fs::rename(manifest + ".whole", manifest);
    }
    void OnUnblocked() override { ++unblocked; }
    const std::string manifest;
    int blocked = 0, unblocked = 0;
  };
  Save(*Lock(), 1);
  Pool pool(folder_ + "/step-000001/manifest.json");
  fs::rename(pool.manifest, pool.manifest + ".whole");
  fs::create_symlink("nothing", pool.manifest);  // it is there, and opening it says ENOENT
  Blockable::SetCurrent(&pool);
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder_);
  Blockable::SetCurrent(nullptr);
  ASSERT_TRUE(steps.ok()) << steps.status();
  EXPECT_EQ(steps->size(), 1u);
  EXPECT_GE(pool.blocked, 1);
  EXPECT_EQ(pool.unblocked, pool.blocked);
}

// A copy, say: what is asked for by its step would be another one.
TEST_F(StepFoldersTest, AFolderMayHaveTheNameOfAnotherStep) {
  auto folders = Lock();
  Save(*folders, 100);
  for (const char* const name : {"/step-000050", "/step-000200"}) {
    fs::copy(folder_ + "/step-000100", folder_ + name, fs::copy_options::recursive);
  }
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder_);
  ASSERT_EQ(steps->size(), 3u);
  EXPECT_EQ((*steps)[0].step, 100);
  EXPECT_FALSE((*steps)[0].has_other_name());
  for (const size_t i : {1, 2}) EXPECT_TRUE((*steps)[i].has_other_name());
}

// It cannot be loaded as it is called.
TEST_F(StepFoldersTest, ACopyIsNoneOfThoseThatAreKept) {
  auto folders = Lock();
  for (const int64_t step : {1, 2}) Save(*folders, step);
  fs::copy(folder_ + "/step-000002", folder_ + "/step-000009", fs::copy_options::recursive);
  ASSERT_TRUE(folders->List().ok());
  ASSERT_TRUE(folders->Prune(2).ok());
  EXPECT_EQ(ListSteps(folder_)->size(), 3u);
  ASSERT_TRUE(folders->Prune(1).ok());
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder_);
  ASSERT_EQ(steps->size(), 1u);
  EXPECT_EQ((*steps)[0].path, folder_ + "/step-000002");
}

TEST_F(StepFoldersTest, WhatACrashLeavesIsFinishedOrRemoved) {
  auto folders = Lock();
  Save(*folders, 100);
  Save(*folders, 200);
  folders = nullptr;
  // Killed before its manifest was there; after it, before it had its name, with an older one of
  // that step; and while an old one was removed.
  fs::create_directory(folder_ + "/.step-000300.0123456789abcdef");
  std::ofstream(folder_ + "/.step-000300.0123456789abcdef/model.safetensors") << "half";
  fs::create_directory(folder_ + "/.step-000200.0123456789abcdef");
  std::ofstream(folder_ + "/.step-000200.0123456789abcdef/manifest.json")
      << *EncodeManifest({200, 3, "", {}});
  fs::create_directory(folder_ + "/.step-000050.0123456789abcdef");
  std::ofstream(folder_ + "/.step-000050.0123456789abcdef/model.safetensors") << "half";
  EXPECT_EQ(Steps(), (std::vector<int64_t>{200, 200, 100}));
  EXPECT_EQ((*ListSteps(folder_))[0].manifest->sequence, 3u);
  folders = Lock();
  EXPECT_EQ(Names(), (Strings{"step-000100", "step-000200"}));
  EXPECT_EQ((*ListSteps(folder_))[0].manifest->sequence, 3u);
}

TEST_F(StepFoldersTest, WhatIsNotOursStays) {
  fs::create_directories(folder_ + "/step-final");
  fs::create_directories(folder_ + "/step-100.old");
  fs::create_directories(folder_ + "/.step-000100.short");
  fs::create_directories(folder_ + "/elsewhere");
  std::ofstream(folder_ + "/elsewhere/kept") << "x";
  fs::create_directory_symlink(folder_ + "/elsewhere", folder_ + "/step-000007");
  // Somebody's copy: a job calls it step-000007.
  fs::create_directories(folder_ + "/step-7");
  std::ofstream(folder_ + "/step-7/manifest.json") << *EncodeManifest({7, 1, "", {}});
  EXPECT_TRUE(Steps().empty());
  const Strings before = Names();
  auto folders = Lock();
  EXPECT_EQ(Names(), before);
  EXPECT_TRUE(fs::exists(folder_ + "/elsewhere/kept"));
  // A damaged one may be of use to somebody.
  Save(*folders, 1);
  std::ofstream(folder_ + "/step-000001/manifest.json") << "{}";
  Save(*folders, 2);
  ASSERT_TRUE(folders->Prune(1).ok());
  folders = nullptr;
  folders = Lock();
  EXPECT_TRUE(fs::exists(folder_ + "/step-000001/manifest.json"));
  const absl::StatusOr<std::vector<StepFolder>> steps = ListSteps(folder_);
  ASSERT_EQ(steps->size(), 2u);
  EXPECT_TRUE((*steps)[0].manifest.ok());
  EXPECT_EQ((*steps)[1].manifest.status().code(), absl::StatusCode::kDataLoss);
}

// Another framework's, whose folders have names like ours.
TEST_F(StepFoldersTest, AFolderWithoutAManifestIsNotOurs) {
  fs::create_directories(folder_ + "/step-001000");
  std::ofstream(folder_ + "/step-001000/weights.bin") << "x";
  fs::create_directories(folder_ + "/.step-001000.notahexnumber!!!");
  const Strings before = Names();
  const auto folders = Lock();
  EXPECT_EQ(Names(), before);
  const absl::Status begun = folders->Begin(1000).status();
  EXPECT_EQ(begun.code(), absl::StatusCode::kAlreadyExists) << begun;
  EXPECT_TRUE(absl::StrContains(begun.message(), "step-001000")) << begun;
  Save(*folders, 1001);
  ASSERT_TRUE(folders->Prune(1).ok());
  EXPECT_TRUE(fs::exists(folder_ + "/step-001000/weights.bin"));
}

// Only where it is certain that there is no manifest is anything removed.
TEST_F(StepFoldersTest, AManifestThatCannotBeReadMayBeThere) {
  const std::string attempt = folder_ + "/.step-000300.0123456789abcdef";
  fs::create_directories(attempt);
  fs::create_symlink("manifest.json", attempt + "/manifest.json");  // ELOOP
  const auto folders = Lock();
  EXPECT_TRUE(fs::exists(fs::symlink_status(attempt + "/manifest.json")));
}

// It may be the newest, so none can be newer for certain; and nothing takes its place.
TEST_F(StepFoldersTest, NothingIsWrittenBesideAManifestThatCannotBeRead) {
  auto folders = Lock();
  Save(*folders, 100);
  Save(*folders, 200);
  const std::string manifest = folder_ + "/step-000200/manifest.json";
  fs::rename(manifest, manifest + ".away");
  fs::create_symlink("manifest.json", manifest);
  const auto says_so = [&](const absl::Status& status) {
    EXPECT_TRUE(absl::StrContains(status.message(), manifest)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "Too many levels of symbolic links")) << status;
  };
  const absl::StatusOr<std::string> attempt = folders->Begin(300);
  ASSERT_TRUE(attempt.ok()) << attempt.status();
  says_so(folders->Commit(*attempt, {300, 0, "", {}}));
  EXPECT_EQ(Names(), (Strings{"step-000100", "step-000200"}));
  // A crash before it had its name.
  folders = nullptr;
  const std::string unnamed = folder_ + "/.step-000200.0123456789abcdef";
  fs::create_directory(unnamed);
  std::ofstream(unnamed + "/manifest.json") << *EncodeManifest({200, 1, "", {}});
  says_so(StepFolders::Lock(folder_).status());
  EXPECT_TRUE(fs::exists(unnamed + "/manifest.json"));
  EXPECT_TRUE(fs::exists(manifest + ".away"));
  fs::rename(manifest + ".away", manifest);
  folders = Lock();
  EXPECT_EQ(Steps(), (std::vector<int64_t>{200, 100}));
  EXPECT_EQ((*ListSteps(folder_))[0].manifest->sequence, 2u);
}

// Whoever gets an empty list begins at step 0.
TEST_F(StepFoldersTest, ADeviceThatIsGoneHidesNoCheckpoint) {
  Save(*Lock(), 100);
  const std::string manifest = folder_ + "/step-000100/manifest.json";
  fs::remove(manifest);
  ASSERT_EQ(mknod(manifest.c_str(), S_IFSOCK | 0600, 0), 0);  // whose open() says ENXIO
  const absl::StatusOr<std::vector<StepFolder>> listed = ListSteps(folder_);
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_FALSE((*listed)[0].manifest.ok() || IsDamage((*listed)[0].manifest.status()))
      << (*listed)[0].manifest.status();
}

TEST_F(StepFoldersTest, WithoutPermissionNothingIsSavedAndNothingIsDamaged) {
  Save(*Lock(), 100);
  const std::string manifest = folder_ + "/step-000100/manifest.json";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Also for root, who may write anywhere but for this.
    __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    const __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {};
    if (syscall(SYS_capset, &version, none) != 0) _exit(2);
    const auto folders = StepFolders::Lock(folder_);
    if (!folders.ok() || chmod(folder_.c_str(), 0500) != 0) _exit(3);
    const absl::Status begun = (*folders)->Begin(200).status();
    if (!absl::IsPermissionDenied(begun) || !absl::StrContains(begun.message(), folder_)) _exit(4);
    if (chmod(folder_.c_str(), 0700) != 0 || chmod(manifest.c_str(), 0) != 0) _exit(5);
    const auto listed = ListSteps(folder_);
    if (!listed.ok() || listed->size() != 1) _exit(6);
    const absl::Status read = (*listed)[0].manifest.status();
    if (!absl::IsPermissionDenied(read) || IsDamage(read)) _exit(7);
    _exit((*folders)->List().status() == read ? 0 : 8);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_EQ(chmod(manifest.c_str(), 0600), 0);
  EXPECT_EQ(Steps(), std::vector<int64_t>{100});
}

// A save failed when its folder was to get its name, and that of the same step succeeded later.
TEST_F(StepFoldersTest, AnOlderAttemptDoesNotTakeTheNameOfANewerOne) {
  for (const bool is_older : {true, false}) {
    fs::remove_all(folder_);
    fs::create_directories(folder_ + "/step-000200");
    std::ofstream(folder_ + "/step-000200/manifest.json") << *EncodeManifest({200, 7, "", {}});
    fs::create_directories(folder_ + "/.step-000200.0123456789abcdef");
    std::ofstream(folder_ + "/.step-000200.0123456789abcdef/manifest.json")
        << *EncodeManifest({200, is_older ? 6u : 8u, "", {}});
    const auto folders = Lock();
    EXPECT_EQ(Names(), Strings{"step-000200"});
    EXPECT_EQ((*ListSteps(folder_))[0].manifest->sequence, is_older ? 7u : 8u);
  }
}

// A power failure may keep what came later alone, but for what fsync has put in order: without a
// manifest, and with the name of a whole one, it would be somebody else's.
TEST_F(StepFoldersTest, AFolderLosesItsNameBeforeItsManifest) {
  class Looks final : public FileCalls {
   public:
    explicit Looks(const std::string& folder) : folder_(folder) {}
    int Fsync(int fd) override {
      struct stat is = {}, folder = {};
      EXPECT_EQ(fstat(fd, &is), 0);
      EXPECT_EQ(stat(folder_.c_str(), &folder), 0);
      for (const auto& entry : fs::directory_iterator(folder_)) {
        has_lost_name |= is.st_ino == folder.st_ino &&
                         absl::StartsWith(entry.path().filename().string(), ".step-000001.") &&
                         fs::exists(entry.path() / "manifest.json");
      }
      return FileCalls::Fsync(fd);
    }
    bool has_lost_name = false;

   private:
    const std::string folder_;
  };
  Save(*Lock(), 1);
  Looks looks(folder_);
  auto folders = StepFolders::Lock(folder_, &looks);
  ASSERT_TRUE(folders.ok()) << folders.status();
  Save(**folders, 2);
  EXPECT_FALSE(looks.has_lost_name);
  ASSERT_TRUE((*folders)->Prune(1).ok());
  EXPECT_TRUE(looks.has_lost_name) << "its new name was not durable when its manifest went";
  EXPECT_EQ(Names(), Strings{"step-000002"});
}

// All of the folders' names have to be there after a power failure, also those of a run that ended
// before it had made them durable.
TEST_F(StepFoldersTest, TheNamesOfAllFoldersAreDurable) {
  class Counts final : public FileCalls {
   public:
    int Fsync(int fd) override {
      ++count;
      return FileCalls::Fsync(fd);
    }
    int count = 0;
  };
  fs::create_directories(folder_);
  for (int round = 0; round < 2; ++round) {
    Counts counts;
    ASSERT_TRUE(StepFolders::Lock(folder_ + "/a/b/c", &counts).ok());
    EXPECT_GE(counts.count, 3) << round;
  }
}

TEST_F(StepFoldersTest, OneHasTheLock) {
  auto first = Lock();
  const absl::Status second = StepFolders::Lock(folder_).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAborted) << second;
  EXPECT_TRUE(absl::StrContains(second.message(), absl::StrCat("process ", getpid(), " of host ")))
      << second;
  EXPECT_TRUE(absl::StrContains(second.message(), folder_)) << second;
  first = nullptr;
  EXPECT_TRUE(StepFolders::Lock(folder_).ok());
}

// The lock goes with its process, however that ends.
TEST_F(StepFoldersTest, AKilledProcessHasNoLock) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto folders = StepFolders::Lock(folder_);
    const char said = folders.ok() ? 'y' : 'n';
    if (write(ready[1], &said, 1) != 1) _exit(1);
    while (true) pause();
  }
  char said = 0;
  ASSERT_EQ(read(ready[0], &said, 1), 1);
  EXPECT_EQ(said, 'y');
  EXPECT_EQ(StepFolders::Lock(folder_).status().code(), absl::StatusCode::kAborted);
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(StepFolders::Lock(folder_).ok());
}

// What a program forks, to load its data, say, may live longer than the program.
TEST_F(StepFoldersTest, AForkedChildKeepsNoLock) {
  int ready[2], over[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(over), 0);
  const auto say = [&](bool all_is_well) {
    const char said = all_is_well ? 'y' : 'n';
    if (write(ready[1], &said, 1) != 1) _exit(1);
  };
  const auto heard = [&] {
    char said = 0;
    EXPECT_EQ(read(ready[0], &said, 1), 1);
    return said;
  };
  const auto live_until_the_test_is_over = [&] {
    close(over[1]);
    say(true);
    char none = 0;
    _exit(read(over[0], &none, 1) == 0 ? 0 : 1);
  };
  const pid_t owner = fork();
  ASSERT_GE(owner, 0);
  if (owner == 0) {
    close(over[1]);
    const auto folders = StepFolders::Lock(folder_);
    const pid_t child = fork();
    if (child == 0) live_until_the_test_is_over();
    say(folders.ok() && child > 0);
    while (true) pause();
  }
  EXPECT_EQ(heard(), 'y');
  EXPECT_EQ(heard(), 'y');
  EXPECT_EQ(StepFolders::Lock(folder_).status().code(), absl::StatusCode::kAborted);
  kill(owner, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(owner, &status, 0), owner);
  auto folders = Lock();
  ASSERT_NE(folders, nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) live_until_the_test_is_over();
  EXPECT_EQ(heard(), 'y');
  folders = nullptr;
  EXPECT_TRUE(StepFolders::Lock(folder_).ok());
  close(over[1]);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int fd : {ready[0], ready[1], over[0]}) close(fd);
}

// Nor does it take the lock from its parent, or write what its parent may write.
TEST_F(StepFoldersTest, AForkedChildsCopyIsOfNoEffect) {
  auto folders = Lock();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool may_write = folders->Begin(1).ok();
    folders = nullptr;
    _exit(may_write ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child may write";
  EXPECT_EQ(StepFolders::Lock(folder_).status().code(), absl::StatusCode::kAborted);
  Save(*folders, 1);
}

TEST_F(StepFoldersTest, ErrorsNameTheFolder) {
  EXPECT_EQ(ListSteps(folder_).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(folder_ + ".file") << "x";
  const absl::Status no_folder = StepFolders::Lock(folder_ + ".file/below").status();
  EXPECT_TRUE(absl::StrContains(no_folder.message(), folder_)) << no_folder;
  const auto folders = Lock();
  fs::remove_all(folder_);
  const absl::Status gone = folders->Begin(1).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
  EXPECT_TRUE(absl::StrContains(gone.message(), folder_)) << gone;
  EXPECT_EQ(folders->Begin(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace distgrad
