// Places and variables of a job's processes, and how they end with each other.
#include "examples/launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

// The tests' working folder is the root of the runfiles.
constexpr char kWorker[] = "examples/launcher_test_worker";

LaunchOptions Job(std::vector<std::string> arguments) {
  LaunchOptions options;
  options.program = kWorker;
  options.arguments = std::move(arguments);
  options.arguments.insert(options.arguments.begin(), kWorker);
  options.grace = absl::InfiniteDuration();
  return options;
}

// A pipe by which processes say that they run and, when it ends, that all of them have ended.
class Fifo {
 public:
  Fifo() : path_(absl::StrCat(getenv("TEST_TMPDIR"), "/fifo")) {
    unlink(path_.c_str());
    EXPECT_EQ(mkfifo(path_.c_str(), 0600), 0);
  }
  ~Fifo() { close(fd_); }

  const std::string& path() const { return path_; }

  void AwaitReady(int count) {
    fd_ = open(path_.c_str(), O_RDONLY);
    char byte;
    for (int i = 0; i < count; ++i) ASSERT_EQ(read(fd_, &byte, 1), 1);
  }

  void AwaitEndOfAll() {
    char byte;
    EXPECT_EQ(read(fd_, &byte, 1), 0);
  }

 private:
  const std::string path_;
  int fd_ = -1;
};

TEST(LauncherTest, TellsEachItsPlace) {
  const std::string file = absl::StrCat(getenv("TEST_TMPDIR"), "/environment");
  // As where a batch script has said that its program is alone.
  const std::vector<std::pair<const char*, const char*>> set = {
      {"MASTER_ADDR", "elsewhere"},
      {"DISTGRAD_RANK", "0"},
      {"DISTGRAD_WORLD_SIZE", "1"},
      {"DISTGRAD_LOCAL_RANK", "0"},
      {"DISTGRAD_LOCAL_WORLD_SIZE", "1"},
      {"DISTGRAD_NAME", "batch"},
      {"DISTGRAD_RENDEZVOUS", "env://?rank=0&world_size=1"}};
  for (const auto& [name, value] : set) setenv(name, value, 1);
  setenv("OMP_NUM_THREADS", "7", 1);
  LaunchOptions options = Job({"env", file});
  options.processes = 3;
  EXPECT_EQ(*Launch(options), 0);
  for (const auto& [name, value] : set) unsetenv(name);

  std::ifstream in(file);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  std::sort(lines.begin(), lines.end());
  ASSERT_EQ(lines.size(), 3);
  const std::vector<std::string> parts = absl::StrSplit(lines[0], ':');
  EXPECT_THAT(parts[1], MatchesRegex("[0-9]+ threads 7 spins 2000 called ''"));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(lines[rank], absl::StrCat(rank, "/3 local ", rank, "/3 at 127.0.0.1:", parts[1]));
  }
}

TEST(LauncherTest, ReservesAPortThatRank0CanTake) { EXPECT_EQ(*Launch(Job({"listen"})), 0); }

TEST(LauncherTest, ReturnsTheStatusOfTheFirstThatFails) {
  EXPECT_EQ(*Launch(Job({"exit", "0", "0"})), 0);
  EXPECT_EQ(*Launch(Job({"exit", "0", "3"})), 3);
}

TEST(LauncherTest, StopsTheOthersWhenOneFails) {
  EXPECT_EQ(*Launch(Job({"crash"})), 128 + SIGABRT);
  EXPECT_EQ(*Launch(Job({"fail", "5"})), 5);
}

TEST(LauncherTest, KillsTheStubbornAndTheirChildren) {
  Fifo fifo;
  LaunchOptions options = Job({"stubborn", fifo.path()});
  options.grace = absl::Milliseconds(10);
  std::thread interrupter([&] {
    fifo.AwaitReady(2);
    kill(getpid(), SIGTERM);
  });
  EXPECT_EQ(*Launch(options), 128 + SIGTERM);
  interrupter.join();
  fifo.AwaitEndOfAll();
}

TEST(LauncherTest, PassesCtrlCOn) {
  Fifo fifo;
  std::thread interrupter([&] {
    fifo.AwaitReady(2);
    kill(getpid(), SIGINT);
  });
  EXPECT_EQ(*Launch(Job({"wait", fifo.path()})), 130);
  interrupter.join();
  fifo.AwaitEndOfAll();
}

TEST(LauncherTest, NobodyOutlivesALauncherThatIsKilled) {
  Fifo fifo;
  std::vector<std::string> arguments = {kWorker, "launch", fifo.path()};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t pid;
  ASSERT_EQ(posix_spawn(&pid, kWorker, nullptr, nullptr, argv.data(), environ), 0);
  fifo.AwaitReady(2);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  fifo.AwaitEndOfAll();
}

TEST(LauncherTest, SaysWhatCannotBeRun) {
  LaunchOptions options;
  options.program = "/nowhere/program";
  const absl::Status status = Launch(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/program"));
}

TEST(JobPlaceTest, ReadsTheEnvironment) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
  EXPECT_FALSE(JobPlaceFromEnvironment()->has_value());
  setenv("RANK", "1", 1);
  EXPECT_THAT(std::string(JobPlaceFromEnvironment().status().message()),
              HasSubstr("WORLD_SIZE is not"));
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", "29500", 1);
  EXPECT_EQ((*JobPlaceFromEnvironment())->rank, 1);
  EXPECT_EQ((*JobPlaceFromEnvironment())->world_size, 2);
  for (const char* wrong : {"2", "-1", "x"}) {
    setenv("RANK", wrong, 1);
    EXPECT_EQ(JobPlaceFromEnvironment().status().code(), absl::StatusCode::kInvalidArgument)
        << wrong;
  }
}

}  // namespace
}  // namespace distgrad
