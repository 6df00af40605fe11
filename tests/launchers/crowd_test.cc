// Many processes, started as launchers start them: each with nothing but its variables.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/launchers/launched_worker.h"
#include "tests/testing/child_process.h"
#include "tests/testing/free_port.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace distgrad {
namespace {

using Variables = std::map<std::string, std::string>;

std::unique_ptr<ChildProcess> NewChild(const Variables& variables, const std::string& what) {
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  auto child = std::make_unique<ChildProcess>(std::vector<std::string>{what});
  for (const auto& [name, value] : variables) unsetenv(name.c_str());
  return child;
}

// Starts `workers` processes with the variables that `of` gives each; all must call all.
void ExpectAllCallAll(int workers, const std::function<Variables(int rank)>& of,
                      bool says_local_ranks = true) {
  const absl::Time begin = absl::Now();
  std::vector<std::unique_ptr<ChildProcess>> children;
  for (int rank = 0; rank < workers; ++rank) {
    children.push_back(NewChild(of(rank), "--worker"));
  }
  for (int rank = 0; rank < workers; ++rank) {
    EXPECT_EQ(children[rank]->ReadLine(),
              absl::StrCat("rank ", rank, " of ", workers, ", local ", says_local_ranks ? rank : 0,
                           " of ", says_local_ranks ? workers : 0, ", called ", workers));
    EXPECT_EQ(children[rank]->Wait(), 0) << "of rank " << rank;
  }
  std::printf("%d processes: %s\n", workers, absl::FormatDuration(absl::Now() - begin).c_str());
}

TEST(CrowdTest, ThirtyTwoWorkers) {
  constexpr int kWorkers = 32;
  const std::string port = absl::StrCat(FreePort());
  const auto of = [&](int rank) {
    return Variables{{"RANK", absl::StrCat(rank)},
                     {"WORLD_SIZE", absl::StrCat(kWorkers)},
                     {"LOCAL_RANK", absl::StrCat(rank)},
                     {"LOCAL_WORLD_SIZE", absl::StrCat(kWorkers)},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", port},
                     {"DISTGRAD_KEY", "a secret of the whole crowd"},
                     {"TORCHELASTIC_RUN_ID", "crowd"}};
  };
  ExpectAllCallAll(kWorkers, of);
}

TEST(CrowdTest, AsSlurmStartsThem) {
  const auto of = [](int rank) {
    return Variables{{"SLURM_JOB_ID", "77"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_PROCID", absl::StrCat(rank)},
                     {"SLURM_NTASKS", "3"},
                     {"SLURM_LOCALID", absl::StrCat(rank)},
                     {"SLURM_NODEID", "0"},
                     {"SLURM_STEP_NODELIST", "gpu7"},
                     {"SLURM_STEP_TASKS_PER_NODE", "3"}};
  };
  ExpectAllCallAll(3, of);
}

TEST(CrowdTest, AsMpirunStartsThem) {
  const auto of = [](int rank) {
    return Variables{{"OMPI_COMM_WORLD_RANK", absl::StrCat(rank)},
                     {"OMPI_COMM_WORLD_SIZE", "3"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", absl::StrCat(rank)},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                     {"PMIX_NAMESPACE", "prterun-host-1@1"}};
  };
  ExpectAllCallAll(3, of);
}

// As torchrun does it, in its agent's store, whoever says the rank: the second start meets nothing
// of the first, whose workers were killed in the midst of it.
TEST(CrowdTest, StartedAgainInOneStoreWithARankOfTheirOwn) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto of = [&](int rank) {
    return Variables{{"RANK", absl::StrCat(rank)},
                     {"WORLD_SIZE", "2"},
                     {"DISTGRAD_RANK", absl::StrCat(rank)},
                     {"DISTGRAD_WORLD_SIZE", "2"},
                     {"DISTGRAD_LOCAL_RANK", absl::StrCat(rank)},
                     {"DISTGRAD_LOCAL_WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", absl::StrCat(agent->getPort())},
                     {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                     {"TORCHELASTIC_RUN_ID", "crowd"}};
  };
  const auto one = NewChild(of(0), "--victim"), other = NewChild(of(1), "--victim");
  EXPECT_NE(one->Wait(), 0);
  EXPECT_NE(other->Wait(), 0);
  ExpectAllCallAll(2, of);
  EXPECT_TRUE(agent->check({"run/crowd/1/worker/0", "run/crowd/2/worker/0"}));
}

// TensorPipe's own transport, for ours would take a Unix-domain socket here.
TEST(CrowdTest, OverIpv6) {
  const int port = FreePort();
  const auto of = [&](int rank) {
    return Variables{
        {"DISTGRAD_RENDEZVOUS", absl::StrCat("tcp://[::1]:", port, "?world_size=2&rank=", rank)},
        {"DISTGRAD_HOST", "::1"},
        {"DISTGRAD_TRANSPORT", "tcp"}};
  };
  ExpectAllCallAll(2, of, /*says_local_ranks=*/false);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  const std::string what = argc == 2 ? argv[1] : "";
  if (what == "--worker" || what == "--victim") {
    const absl::Status status = distgrad::RunLaunchedWorker([&](const distgrad::Worker&) {
      if (what == "--victim") raise(SIGKILL);
      return absl::OkStatus();
    });
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
