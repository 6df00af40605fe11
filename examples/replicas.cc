// Data parallel training across processes: replicas of one network on Fashion-MNIST, each with its
// part of every batch.
//
//   tools/bazel run //examples:replicas
//   tools/bazel run //examples:replicas -- --help
//
// On several machines, or under torchrun, srun or mpirun: docs/launching.md.
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/status.h"
#include "core/worker/join_process_group.h"
#include "examples/interrupt.h"
#include "examples/program.h"
#include "examples/replica.h"
#include "examples/single.h"
#include "examples/training.h"

namespace distgrad {
namespace {

// Runs one rank of the job. Rank 0 evaluates and reports; the others wait for it in their next
// step.
absl::Status TrainReplica(const Options& options, const JobPlace& place) {
  const bool leads = place.rank == 0;
  if (leads) CatchInterrupts();
  DG_ASSIGN_OR_RETURN(
      const std::unique_ptr<Training> training,
      Training::Create(options, leads ? Training::Role::kLead : Training::Role::kFollow));
  DG_ASSIGN_OR_RETURN(
      std::shared_ptr<ProcessGroup> group,
      JoinProcessGroup(
          {.name = "replicas", .timeout = options.timeout, .join_timeout = options.timeout}, {}));
  DG_ASSIGN_OR_RETURN(const std::unique_ptr<ReplicaLearner> learner,
                      ReplicaLearner::Create(std::move(group), options.seed));
  return training->Run(*learner);
}

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  const distgrad::CommandLine line = {
      .name = "replicas",
      .description =
          "Trains a small convolutional network on Fashion-MNIST, data parallel: this program\n"
          "starts processes on this machine that have the whole network each, and a part of each\n"
          "batch; their gradients are averaged. Where a launcher has set RANK and WORLD_SIZE, it\n"
          "joins that job as one process instead.\n",
      .processes = "--replicas",
      .processes_description = "Processes, each with a replica of the network",
      .most_processes = 64};
  return distgrad::RunProgram(argc, argv, line, {distgrad::TrainSingle, distgrad::TrainReplica});
}
