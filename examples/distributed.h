// Training over workers: each holds a stage of the network, worker 0 has the data and leads.
#ifndef DISTGRAD_EXAMPLES_DISTRIBUTED_H_
#define DISTGRAD_EXAMPLES_DISTRIBUTED_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint/job/part.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"
#include "examples/model.h"
#include "examples/training.h"

namespace distgrad {

// A worker's stage, with its part of the optimizer, and what the others may call of it:
//
//   "forward"  {images or activations}: the scores; {the same, labels}: the mean loss of the
//              batch. Runs this stage and calls the next one, nested.
//
// Thread-safe.
class StageServer {
 public:
  // Registers that. The worker must outlive it.
  static absl::StatusOr<std::unique_ptr<StageServer>> Create(Worker* worker, uint64_t seed);

  const std::vector<at::Tensor>& parameters() const { return stage_.parameters(); }
  // Steps the parts of all workers.
  Optimizer& optimizer() const { return *optimizer_; }

  // What a checkpoint has of it. It has to outlive the part that is made of them.
  CheckpointContents Contents() const;

 private:
  StageServer(Worker* worker, Stage stage, std::unique_ptr<Optimizer> optimizer)
      : worker_(worker), stage_(std::move(stage)), optimizer_(std::move(optimizer)) {}

  absl::StatusOr<Message> Forward(Request& request);

  // Constant after construction.
  Worker* const worker_;
  const Stage stage_;
  const std::unique_ptr<Optimizer> optimizer_;
};

// Leads the training, on worker 0. For one thread.
class DistributedLearner : public Learner {
 public:
  // Both must outlive it.
  DistributedLearner(Worker* worker, Optimizer* optimizer)
      : worker_(worker), optimizer_(optimizer) {}

  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

 private:
  Worker* const worker_;
  Optimizer* const optimizer_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_DISTRIBUTED_H_
