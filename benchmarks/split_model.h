// The models that //benchmarks:pipeline splits over processes, the same for every side.
#ifndef DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_
#define DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "examples/model.h"

namespace distgrad {

// What is split.
struct SplitJob {
  enum class Model : uint8_t {
    kLinear,       // linear layers that are all the same
    kTransformer,  // the same of transformer blocks
    kImages,       // the network of //examples:fashion_mnist, which has layers and width of its own
  };

  std::string name;
  Model model = Model::kLinear;
  int layers = 0, width = 0, batch = 0, sequence = 1, micro_batches = 8;
  int processes = 2;  // that it is split over, if it is
  int steps = 10;     // of a round

  // What is counted: "tokens".
  const char* Unit() const;
  // A batch, of random numbers.
  at::Tensor Inputs() const;
  at::Tensor Targets() const;
  at::Tensor Loss(const at::Tensor& outputs, const at::Tensor& targets) const;
};

// Some of the layers: part `index` of `count`. Immutable, but for the values of its parameters.
class SplitPart {
 public:
  SplitPart(const SplitJob& job, int index, int count);
  // One tensor, and one.
  std::vector<at::Tensor> Forward(std::vector<at::Tensor> in) const;
  // Leaves that require grad.
  std::vector<at::Tensor> Parameters() const;
  // Takes a part of each gradient, which `gradient_of` has for each parameter, off it.
  void Descend(const std::function<at::Tensor(const at::Tensor& parameter)>& gradient_of) const;

 private:
  at::Tensor Block(const at::Tensor& x, const std::vector<at::Tensor>& layer) const;

  const SplitJob::Model model_;
  const int width_;
  std::vector<std::vector<at::Tensor>> weights_;  // by layer
  std::optional<Stage> stage_;                    // of kImages, in place of these
};

// Takes steps in rounds, after one that does not count, and says of each how many samples (of a
// transformer: tokens) were computed in a second.
absl::Status MeasureSplit(const SplitJob& job, int rounds, std::vector<double>* said,
                          const std::function<absl::Status()>& step);

}  // namespace distgrad

#endif  // DISTGRAD_BENCHMARKS_SPLIT_MODEL_H_
