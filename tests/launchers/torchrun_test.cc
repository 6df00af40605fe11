// Our workers under the real torchrun, of the torch that we are built with. It is Python, and
// imports all of torch and of what torch loads for CUDA: so it is there with --config=cuda alone.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

constexpr char kTorchrun[] = "../torchrun/torchrun";
constexpr char kWorker[] = "tests/launchers/launched_worker";

struct Result {
  int status = -1;
  std::string output;  // of torchrun and of all that it started

  int Count(const std::string& text) const {
    int count = 0;
    for (size_t at = output.find(text); at != std::string::npos; at = output.find(text, at + 1)) {
      ++count;
    }
    return count;
  }
};

class TorchrunTest : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'") != 0) {
      GTEST_SKIP() << "there is no python3 that is 3.11, which torch's wheel is for";
    }
    std::filesystem::remove(marker_);
  }

  Result Run(const std::string& arguments) {
    Result result;
    FILE* pipe = popen(absl::StrCat(kTorchrun, " ", arguments, " 2>&1").c_str(), "r");
    char line[4096];
    while (std::fgets(line, sizeof(line), pipe) != nullptr) result.output += line;
    const int status = pclose(pipe);
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
  }
  // `workers` on this machine, by one agent.
  Result RunHere(int workers, const std::string& options, const std::string& worker) {
    return Run(absl::StrCat("--standalone --local-addr=127.0.0.1 --nproc-per-node=", workers, " ",
                            options, " --no-python ", kWorker, " ", worker));
  }

  const std::string marker_ = testing::TempDir() + "/marker";
};

TEST_F(TorchrunTest, AllCallAll) {
  for (const int workers : {2, 4}) {
    const Result result = RunHere(workers, "", "");
    EXPECT_EQ(result.status, 0) << result.output;
    for (int rank = 0; rank < workers; ++rank) {
      const std::string line = absl::StrCat("rank ", rank, " of ", workers, ", local ", rank,
                                            " of ", workers, ", called ", workers, "\n");
      EXPECT_EQ(result.Count(line), 1) << line << result.output;
    }
  }
}

// In the store of the first start, of which worker 1's death leaves all entries.
TEST_F(TorchrunTest, StartsAgainWhenAWorkerDies) {
  const Result result = RunHere(2, "--max-restarts=1", absl::StrCat("kill 1 ", marker_));
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_TRUE(std::filesystem::exists(marker_));
  for (const char* line :
       {"rank 0 of 2, local 0 of 2, called 2\n", "rank 1 of 2, local 1 of 2, called 2\n"}) {
    EXPECT_EQ(result.Count(line), 1) << result.output;
  }
}

// Two agents, each with its own count of restarts: only one of them has seen a worker die.
TEST_F(TorchrunTest, StartsAgainOnAllMachines) {
  const std::string arguments = absl::StrCat(
      "--nnodes=2 --nproc-per-node=2 --max-restarts=1 --rdzv-backend=c10d --rdzv-id=two "
      "--local-addr=127.0.0.1 --rdzv-endpoint=127.0.0.1:",
      FreePort(), " --no-python ", kWorker, " kill 3 ", marker_);
  std::future<Result> other = std::async(std::launch::async, [&] { return Run(arguments); });
  Result result = Run(arguments);
  const Result more = other.get();
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_EQ(more.status, 0) << more.output;
  EXPECT_TRUE(std::filesystem::exists(marker_));
  result.output += more.output;
  for (int rank = 0; rank < 4; ++rank) {
    const std::string line =
        absl::StrCat("rank ", rank, " of 4, local ", rank % 2, " of 2, called 4\n");
    EXPECT_EQ(result.Count(line), 1) << line << result.output;
  }
}

TEST_F(TorchrunTest, ItsSummarySaysWhatWeReport) {
  const Result result = RunHere(2, "", "fail 1");
  EXPECT_NE(result.status, 0);
  const size_t cause = result.output.find("Root Cause");
  ASSERT_NE(cause, std::string::npos) << result.output;
  const std::string summary = result.output.substr(cause);
  EXPECT_TRUE(absl::StrContains(summary, "rank      : 1 (local_rank: 1)")) << summary;
  // Not its exit status: the other rank, which loses it, may be seen to end first, and then
  // torchrun ends this one before it returns.
  EXPECT_TRUE(
      absl::StrContains(summary, "traceback : RESOURCE_EXHAUSTED: the disk of rank 1 is full"))
      << summary;
}

}  // namespace
}  // namespace distgrad
