// Runs each rank on a thread of its own.
#include "tests/testing/ranks.h"

#include <thread>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"
#include "core/tensor/exception.h"
#include "gtest/gtest.h"

namespace distgrad {

ClusterKey KeyOfSuite() { return LoadClusterKey("").value(); }

void RunRanks(int size, const std::function<void(std::shared_ptr<ProcessGroup>)>& rank,
              const RanksOptions& options) {
  const ClusterKey key = options.cluster_key.has_value() ? *options.cluster_key : KeyOfSuite();
  const auto store = options.store == nullptr ? NewInProcessStore() : options.store;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      auto group = ProcessGroup::Create({.name = "ranks",
                                         .store = store,
                                         .rank = r,
                                         .size = size,
                                         .timeout = options.timeout,
                                         .cluster_key = key});
      DG_CHECK(group.ok()) << group.status();
      try {
        rank(*std::move(group));
      } catch (...) {
        DG_CHECK(false) << "rank " << r << ": " << StatusFromException(std::current_exception());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void StepWithTheOthers(GradientAverager& averager, const std::function<void()>& zero_grad,
                       const std::function<void()>& step) {
  while (true) {
    zero_grad();
    const absl::StatusOr<bool> others = averager.Join();
    ASSERT_TRUE(others.ok()) << others.status();
    if (!*others) return;
    step();
  }
}

}  // namespace distgrad
