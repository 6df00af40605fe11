// Training in one process, with plain libtorch and no distgrad, for comparison.
#ifndef DISTGRAD_EXAMPLES_SINGLE_H_
#define DISTGRAD_EXAMPLES_SINGLE_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/model.h"
#include "examples/options.h"
#include "examples/training.h"

namespace torch::optim {
class SGD;
}

namespace distgrad {

// The whole run: for --single.
absl::Status TrainSingle(const Options& options);

// Trains the whole network in this process. For one thread.
class SingleLearner : public Learner {
 public:
  explicit SingleLearner(uint64_t seed, at::Device device = at::kCPU);
  ~SingleLearner() override;

  absl::StatusOr<double> Step(const Batch& batch, double learning_rate) override;
  absl::StatusOr<at::Tensor> Predict(const at::Tensor& images) override;

  const std::vector<at::Tensor>& parameters() const { return model_.parameters(); }

 private:
  const Stage model_;
  const std::unique_ptr<torch::optim::SGD> optimizer_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_SINGLE_H_
