// Makes the workers of a cluster at the same time, and ends them.
#include "tests/testing/cluster.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"

namespace distgrad {
namespace {

std::unique_ptr<Worker> Create(WorkerOptions options) {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(std::move(options));
  DG_CHECK(worker.ok()) << worker.status();
  return *std::move(worker);
}

}  // namespace

std::string WorkerName(int i) { return absl::StrCat("worker", i); }

Cluster::Cluster(const ClusterOptions& options)
    : options_(options),
      store_(options.store != nullptr ? options.store : NewInProcessStore()),
      network_(std::make_shared<InprocNetwork>(options.faults)),
      workers_(options.workers) {
  std::vector<std::thread> threads;
  for (int i = 0; i < options.workers; ++i) {
    threads.emplace_back([this, i] { workers_[i] = Start(i); });
  }
  for (std::thread& thread : threads) thread.join();
}

std::unique_ptr<Worker> Cluster::Start(int i) const {
  WorkerOptions options = OptionsOf(i);
  options.name = WorkerName(i);
  options.rank = i;
  options.world_size = options_.workers;
  return Create(std::move(options));
}

void Cluster::Restart(int i) {
  Kill(i);
  workers_[i] = Start(i);
}

std::unique_ptr<Worker> Cluster::Join(std::string name) {
  WorkerOptions options = OptionsOf(size());
  options.name = std::move(name);
  options.join = true;
  return Create(std::move(options));
}

WorkerOptions Cluster::OptionsOf(int i) const {
  return {.store = store_,
          .transport = options_.transport,
          .network = network_,
          .thread_count = options_.thread_count,
          .timeout = options_.timeout,
          .serve_operators = options_.serve_operators,
          .limits = options_.limits_of.count(i) > 0 ? options_.limits_of.at(i) : options_.limits,
          .device_maps = i == 0 ? options_.device_maps : std::map<std::string, DevicePairs>(),
          .gpu_channel = i != 0 || options_.gpu_channel};
}

Cluster::~Cluster() {
  const bool whole =
      std::all_of(workers_.begin(), workers_.end(), [](auto& w) { return w != nullptr; });
  std::vector<std::thread> threads;
  for (auto& worker : workers_) {
    if (worker == nullptr) continue;
    threads.emplace_back([&worker, whole] {
      if (whole) {
        const absl::Status left = worker->Shutdown(absl::Now() + absl::Seconds(60));
        DG_CHECK(left.ok()) << left;
      }
      worker.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace distgrad
