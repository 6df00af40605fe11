// How long the start of a job takes, its barriers and its end, with everybody's membership in this
// process and one store that is served over TCP.
//
//   tools/bazel run //benchmarks:membership -- 256
#include "core/membership/membership.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/base/status.h"
#include "core/membership/store/tcp_store.h"

namespace distgrad {
namespace {

constexpr int kBarriers = 10;

// When each step was over for this worker.
struct Times {
  absl::Time entered;
  std::vector<absl::Time> barriers;
  absl::Time left;
};

absl::Status RunWorker(std::shared_ptr<Store> store, int rank, int workers, Times* times) {
  const Deadline deadline = Deadline::After(absl::Minutes(5));
  Membership members(std::move(store), {.rank = rank, .world_size = workers});
  DG_ASSIGN_OR_RETURN(WorkerInfo self, members.Claim(deadline));
  self.address = std::string(100, 'x');
  DG_RETURN_IF_ERROR(members.Enter(self, deadline).status());
  times->entered = absl::Now();
  for (int i = 0; i < kBarriers; ++i) {
    DG_RETURN_IF_ERROR(members.Barrier(deadline));
    times->barriers.push_back(absl::Now());
  }
  DG_RETURN_IF_ERROR(members.Shutdown(deadline));
  times->left = absl::Now();
  return absl::OkStatus();
}

int Main(int workers) {
  const absl::Time begin = absl::Now();
  TcpStoreOptions options;
  options.is_server = true;
  std::shared_ptr<Store> server = NewTcpStore(options).value();
  options.port = static_cast<TcpStore&>(*server).port();
  options.is_server = false;
  options.deadline = Deadline::After(absl::Minutes(5));
  std::vector<Times> times(workers);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      auto store = rank == 0 ? server : std::shared_ptr<Store>(NewTcpStore(options).value());
      const absl::Status status = RunWorker(std::move(store), rank, workers, &times[rank]);
      if (status.ok()) return;
      std::fprintf(stderr, "worker %d: %s\n", rank, status.ToString().c_str());
      std::exit(1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  absl::Time entered = begin, left = begin, first = begin, last = begin;
  for (const Times& time : times) {
    entered = std::max(entered, time.entered);
    first = std::max(first, time.barriers.front());
    last = std::max(last, time.barriers.back());
    left = std::max(left, time.left);
  }
  std::printf("%d workers: start %.3f s, barrier %.4f s, end %.3f s\n", workers,
              absl::ToDoubleSeconds(entered - begin),
              absl::ToDoubleSeconds(last - first) / (kBarriers - 1),
              absl::ToDoubleSeconds(left - last));
  return 0;
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) { return distgrad::Main(argc > 1 ? std::atoi(argv[1]) : 64); }
