// The models that //benchmarks:pipeline splits over processes, the same for every side.
#ifndef DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_
#define DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace distgrad {

// What is split: layers that are all the same.
struct SplitJob {
  std::string name;
  bool transformer = false;
  int layers = 0, width = 0, batch = 0, sequence = 1, micro_batches = 8;
  int processes = 2;  // that it is split over, if it is
  int steps = 10;     // of a round

  std::vector<int64_t> BatchSizes() const;
};

// Some of the layers. Immutable, but for the values of its parameters.
class SplitPart {
 public:
  SplitPart(const SplitJob& job, int layers);
  // One tensor, and one.
  std::vector<at::Tensor> Forward(std::vector<at::Tensor> in) const;
  // Leaves that require grad.
  std::vector<at::Tensor> Parameters() const;
  // Takes a part of each gradient, which `gradient_of` has for each parameter, off it.
  void Descend(const std::function<at::Tensor(const at::Tensor& parameter)>& gradient_of) const;

 private:
  at::Tensor Block(const at::Tensor& x, const std::vector<at::Tensor>& layer) const;

  const bool transformer_;
  const int width_;
  std::vector<std::vector<at::Tensor>> weights_;  // by layer
};

at::Tensor SplitLoss(std::vector<at::Tensor> outputs, std::vector<at::Tensor> targets);

// Takes steps in rounds, after one that does not count, and says of each how many samples (of a
// transformer: tokens) were computed in a second.
absl::Status MeasureSplit(const SplitJob& job, int rounds, std::vector<double>* said,
                          const std::function<absl::Status()>& step);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_
