// The network of the example: three convolutions and a classifier of two layers, 356,746
// parameters, cut into consecutive stages, one for each worker.
#ifndef DISTGRAD_EXAMPLES_MODEL_H_
#define DISTGRAD_EXAMPLES_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"

namespace distgrad {

// The number of layers that have parameters, which is also the largest number of stages.
inline constexpr int kLayers = 5;

// Consecutive layers with their parameters. Forward may run on many threads, as long as none writes
// the parameters meanwhile.
class Stage {
 public:
  // Creates stage `index` of `count` on a device, where it computes, wherever its input is. They
  // take about the same time as far as the layers allow that. The same seed gives the same
  // parameters however the network is cut. kInvalidArgument if it cannot be cut into so many.
  static absl::StatusOr<Stage> Create(int index, int count, uint64_t seed,
                                      at::Device device = at::kCPU);

  // The first stage takes float [n, 1, 28, 28]; the last one returns float [n, 10], the
  // scores of the classes before softmax.
  at::Tensor Forward(const at::Tensor& input) const;

  // Weights and biases, in the order of the layers: leaves that require grad.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // The parameters by names that are theirs however the network is cut: "layer3.weight".
  std::map<std::string, at::Tensor> named_parameters() const;

  // Names its layers, for people.
  std::string Describe() const;

 private:
  Stage(int begin, int end, uint64_t seed, at::Device device);

  // Constant after construction. Layers begin_ to end_ (exclusive).
  int begin_;
  int end_;
  std::vector<at::Tensor> parameters_;
};

// Returns the mean cross entropy of a batch: `scores` as the last stage gives them, int64 labels
// [n], on any device.
at::Tensor Loss(const at::Tensor& scores, const at::Tensor& labels);

// Counts the images of a batch whose label has the highest score.
int64_t CountCorrect(const at::Tensor& scores, const at::Tensor& labels);

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_MODEL_H_
