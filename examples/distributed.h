// Training over workers: each holds a stage of the network, worker 0 has the data and leads.
#ifndef DISTGRAD_EXAMPLES_DISTRIBUTED_H_
#define DISTGRAD_EXAMPLES_DISTRIBUTED_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/job/part.h"
#include "core/optim/local_optimizer.h"
#include "core/worker/worker.h"
#include "examples/model.h"
#include "examples/training.h"

namespace distgrad {

// A worker's stage, and what the others may call of it:
//
//   "forward"  {images or activations}: the scores; {the same, labels}: the mean loss of the
//              batch. Runs this stage and calls the next one, nested.
//   "step"     {learning rate}: steps this stage's optimizer from the gradients of the context.
//
// Thread-safe.
class StageServer {
 public:
  // Registers both. The worker must outlive it.
  static absl::StatusOr<std::unique_ptr<StageServer>> Create(Worker* worker, uint64_t seed);

  const std::vector<at::Tensor>& parameters() const { return stage_.parameters(); }

  // What a checkpoint has of it. It has to outlive the part that is made of them.
  CheckpointContents Contents() const;

 private:
  StageServer(Worker* worker, Stage stage);

  absl::StatusOr<Message> Forward(Request& request);
  absl::StatusOr<Message> Step(Request& request);

  // Constant after construction.
  Worker* const worker_;
  const Stage stage_;
  const std::unique_ptr<LocalOptimizer> optimizer_;
};

// Leads the training, on worker 0. For one thread.
class DistributedLearner : public Learner {
 public:
  explicit DistributedLearner(Worker* worker) : worker_(worker) {}

  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

 private:
  Worker* const worker_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_DISTRIBUTED_H_
