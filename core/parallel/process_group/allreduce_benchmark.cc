// How long two processes take to average a tensor, with a cluster key and without.
//
//   tools/bazel run -c opt //core/parallel/process_group:allreduce_benchmark [-- MEGABYTES ROUNDS]
//
// Both groups stand at once and take turns, so that whatever else the machine does meets both.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/check.h"
#include "core/membership/store/file_store.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {
namespace {

int RunRank(int rank, const std::string& folder, int64_t megabytes, int rounds) {
  at::set_num_threads(1);
  std::vector<std::shared_ptr<ProcessGroup>> groups;
  for (const std::string& key : {std::string(), std::string("a key of a benchmark")}) {
    auto group =
        ProcessGroup::Create({.name = key.empty() ? "open" : "encrypted",
                              .store = NewFileStore(absl::StrCat(folder, "/store")).value(),
                              .rank = rank,
                              .size = 2,
                              .cluster_key = key});
    DG_CHECK(group.ok()) << group.status();
    groups.push_back(*std::move(group));
  }
  const at::Tensor tensor = at::ones({megabytes * 1'000'000 / 4});
  std::vector<double> times[2];
  for (int round = -1; round < rounds; ++round) {
    for (const int which : {0, 1}) {
      const absl::Time begin = absl::Now();
      const absl::Status status = groups[which]->Average({tensor});
      DG_CHECK(status.ok()) << status;
      if (round >= 0) times[which].push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
    }
  }
  if (rank != 0) return 0;
  for (std::vector<double>& each : times) std::sort(each.begin(), each.end());
  const double open = times[0][rounds / 2], encrypted = times[1][rounds / 2];
  std::printf("%lld MB, medians of %d: %.1f ms without a key, %.1f ms with one, %.2f times\n",
              static_cast<long long>(megabytes), rounds, open, encrypted, encrypted / open);
  std::printf("the fastest: %.1f ms and %.1f ms, %.2f times\n", times[0][0], times[1][0],
              times[1][0] / times[0][0]);
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  const int64_t megabytes = argc > 1 ? std::atoll(argv[1]) : 100;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  if (megabytes < 1 || rounds < 1) {
    std::fprintf(stderr, "usage: %s [MEGABYTES ROUNDS]\n", argv[0]);
    return 2;
  }
  char folder[] = "/tmp/allreduce_benchmark.XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    std::perror("mkdtemp");
    return 1;
  }
  const pid_t child = fork();  // before there are threads
  if (child == 0) return distgrad::RunRank(1, folder, megabytes, rounds);
  const int code = distgrad::RunRank(0, folder, megabytes, rounds);
  int status = 0;
  waitpid(child, &status, 0);
  std::error_code not_removed;
  std::filesystem::remove_all(folder, not_removed);
  return code != 0 ? code : WEXITSTATUS(status);
}
