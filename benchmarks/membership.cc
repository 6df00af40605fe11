// Measures the start of a job, its barriers and its end, with one store that is served over TCP:
// with the membership of all workers in this process, or with a process for each worker.
//
//   tools/bazel run //benchmarks:membership -- 256
//   tools/bazel run //benchmarks:membership -- 256 --processes
#include "core/membership/membership.h"

#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"
#include "core/membership/store/tcp_store.h"
#include "core/worker/worker.h"
#include "tests/testing/free_port.h"

namespace distgrad {
namespace {

constexpr int kBarriers = 10;
constexpr absl::Duration kPatience = absl::Minutes(5);

// The times at which this worker had finished each step.
struct Times {
  absl::Time entered;
  std::vector<absl::Time> barriers;
  absl::Time left;
};

absl::Status TimeBarriers(absl::FunctionRef<absl::Status()> barrier, Times* times) {
  times->entered = absl::Now();
  for (int i = 0; i < kBarriers; ++i) {
    DG_RETURN_IF_ERROR(barrier());
    times->barriers.push_back(absl::Now());
  }
  return absl::OkStatus();
}

absl::Status RunMember(std::shared_ptr<Store> store, int rank, int workers, Times* times) {
  const Deadline deadline = Deadline::After(kPatience);
  Membership members(std::move(store), {.rank = rank, .world_size = workers});
  DG_ASSIGN_OR_RETURN(WorkerInfo self, members.Claim(deadline));
  self.address = std::string(100, 'x');
  DG_RETURN_IF_ERROR(members.Enter(self, deadline).status());
  DG_RETURN_IF_ERROR(TimeBarriers([&] { return members.Barrier(deadline); }, times));
  DG_RETURN_IF_ERROR(members.Shutdown(deadline));
  times->left = absl::Now();
  return absl::OkStatus();
}

absl::Status RunWorker(int port, int rank, int workers, Times* times) {
  const Deadline deadline = Deadline::After(kPatience);
  DG_ASSIGN_OR_RETURN(const auto worker,
                      Worker::Create({.rendezvous = absl::StrCat("tcp://127.0.0.1:", port),
                                      .rank = rank,
                                      .world_size = workers,
                                      .thread_count = 1,
                                      .join_timeout = kPatience}));
  DG_RETURN_IF_ERROR(TimeBarriers([&] { return worker->Barrier(deadline); }, times));
  DG_RETURN_IF_ERROR(worker->Shutdown(deadline));
  times->left = absl::Now();
  return absl::OkStatus();
}

int Failed(int rank, const absl::Status& status) {
  std::fprintf(stderr, "worker %d: %s\n", rank, status.ToString().c_str());
  return 1;
}

void Report(int workers, absl::Time begin, const std::vector<Times>& all) {
  absl::Time entered = begin, left = begin, first = begin, last = begin;
  for (const Times& times : all) {
    entered = std::max(entered, times.entered);
    first = std::max(first, times.barriers.front());
    last = std::max(last, times.barriers.back());
    left = std::max(left, times.left);
  }
  std::printf("%d workers: start %.3f s, barrier %.4f s, end %.3f s\n", workers,
              absl::ToDoubleSeconds(entered - begin),
              absl::ToDoubleSeconds(last - first) / (kBarriers - 1),
              absl::ToDoubleSeconds(left - last));
}

int InThreads(int workers) {
  const absl::Time begin = absl::Now();
  TcpStoreOptions options;
  options.is_server = true;
  std::shared_ptr<Store> server = NewTcpStore(options).value();
  options.port = static_cast<TcpStore&>(*server).port();
  options.is_server = false;
  options.deadline = Deadline::After(kPatience);
  std::vector<Times> times(workers);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      auto store = rank == 0 ? server : std::shared_ptr<Store>(NewTcpStore(options).value());
      const absl::Status status = RunMember(std::move(store), rank, workers, &times[rank]);
      if (!status.ok()) std::exit(Failed(rank, status));
    });
  }
  for (std::thread& thread : threads) thread.join();
  Report(workers, begin, times);
  return 0;
}

// The processes are forks of this one, which has no threads: so they share libtorch's memory as
// loaded. Worker 0 reports its own times: its first barrier ends the start.
int InProcesses(int workers) {
  const absl::Time begin = absl::Now();
  const int port = FreePort();
  for (int rank = 0; rank < workers; ++rank) {
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return 1;
    }
    if (child > 0) continue;
    Times times;
    const absl::Status status = RunWorker(port, rank, workers, &times);
    if (status.ok() && rank == 0) Report(workers, begin, {times});
    std::fflush(stdout);
    _exit(status.ok() ? 0 : Failed(rank, status));
  }
  int failed = 0;
  for (int i = 0, status; i < workers && wait(&status) > 0; ++i) failed += status != 0;
  if (failed > 0) std::fprintf(stderr, "%d of %d workers failed\n", failed, workers);
  return failed > 0;
}

int Main(int argc, char** argv) {
  int workers = 64;
  bool processes = false;
  CLI::App app("Times the start of a job, its barriers and its end.");
  app.add_option("workers", workers, "How many")->check(CLI::Range(1, 4096));
  app.add_flag("--processes", processes, "One process each, with all that a worker has");
  CLI11_PARSE(app, argc, argv);
  return processes ? InProcesses(workers) : InThreads(workers);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc, argv); }
