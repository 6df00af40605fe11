#include "tests/testing/cluster.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/rpc/store/in_process_store.h"

namespace distgrad {

std::string WorkerName(int i) { return absl::StrCat("worker", i); }

Cluster::Cluster(const ClusterOptions& options)
    : network_(std::make_shared<InprocNetwork>(options.faults)), workers_(options.workers) {
  const std::shared_ptr<Store> store = NewInProcessStore();
  std::vector<std::thread> threads;
  for (int i = 0; i < options.workers; ++i) {
    threads.emplace_back([&, i] {
      absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(
          {.name = WorkerName(i),
           .store = store,
           .rank = i,
           .world_size = options.workers,
           .transport = options.transport,
           .network = network_,
           .threads = options.threads,
           .timeout = options.timeout,
           .serve_operators = options.serve_operators,
           .limits = options.limits,
           .device_maps = i == 0 ? options.device_maps : std::map<std::string, DevicePairs>(),
           .gpu_channel = i != 0 || options.gpu_channel});
      DG_CHECK(worker.ok()) << worker.status();
      workers_[i] = *std::move(worker);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Cluster::~Cluster() {
  const bool whole =
      std::all_of(workers_.begin(), workers_.end(), [](auto& w) { return w != nullptr; });
  std::vector<std::thread> threads;
  for (auto& worker : workers_) {
    if (worker == nullptr) continue;
    threads.emplace_back([&worker, whole] {
      if (whole) {
        const absl::Status left = worker->Leave(absl::Now() + absl::Seconds(60));
        DG_CHECK(left.ok()) << left;
      }
      worker.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace distgrad
