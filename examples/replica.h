// Training of replicas: each process has the whole network and its part of each batch, and the
// gradients are averaged over all processes while the backward runs.
#ifndef DISTGRAD_EXAMPLES_REPLICA_H_
#define DISTGRAD_EXAMPLES_REPLICA_H_

#include <memory>

#include "absl/status/statusor.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"
#include "examples/model.h"
#include "examples/training.h"

namespace torch::optim {
class SGD;
}

namespace distgrad {

// Trains as one rank of a group whose ranks all take the same steps with the same batches. For one
// thread.
class ReplicaLearner : public Learner {
 public:
  static absl::StatusOr<std::unique_ptr<ReplicaLearner>> Create(std::shared_ptr<ProcessGroup> group,
                                                                uint64_t seed);
  ~ReplicaLearner() override;

  // Takes the batch of all ranks, and computes with this rank's rows of it.
  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

  const std::vector<at::Tensor>& parameters() const { return model_.parameters(); }

 private:
  ReplicaLearner(std::shared_ptr<ProcessGroup> group, Stage model);

  const std::shared_ptr<ProcessGroup> group_;
  const Stage model_;
  const std::unique_ptr<torch::optim::SGD> optimizer_;
  std::unique_ptr<GradientAverager> averager_;  // constant after Create()
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_REPLICA_H_
