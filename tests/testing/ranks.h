// The ranks of a process group as threads of one process, for tests.
//
//   RunRanks(2, [](std::shared_ptr<ProcessGroup> group) {
//     ... group->rank() ...
//   });
#ifndef DISTGRAD_TESTS_TESTING_RANKS_H_
#define DISTGRAD_TESTS_TESTING_RANKS_H_

#include <functional>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "core/net/cluster_key.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"

namespace distgrad {

struct RanksOptions {
  absl::Duration timeout = absl::Minutes(1);
  std::shared_ptr<Store> store = nullptr;                // by default one of this process
  std::optional<ClusterKey> cluster_key = std::nullopt;  // by default that of the suite
};

// What the environment says (DISTGRAD_KEY), by which suites run with a key, too; empty: none.
ClusterKey KeyOfSuite();

// Returns when all are done. A group that cannot be made, and a rank that throws, ends the test
// program with its status.
void RunRanks(int size, const std::function<void(std::shared_ptr<ProcessGroup>)>& rank,
              const RanksOptions& options = {});

// Takes the steps of a rank that has run out of input, in place of its others, until all have.
void StepWithTheOthers(GradientAverager& averager, const std::function<void()>& zero_grad,
                       const std::function<void()>& step);

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_RANKS_H_
