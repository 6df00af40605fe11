// Random programs over libtorch's operators, for tests that compare two ways to run backward.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_RANDOM_PROGRAM_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_RANDOM_PROGRAM_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace distgrad {

struct ProgramOptions {
  at::ScalarType dtype = at::kFloat;
  int operators = 20;
  int roots = 2;
  bool hooks = false;
  bool post_accumulate_hooks = true;  // among the hooks
  // Matrices of 4 x 4, three at most, with which the program begins in place of leaves.
  std::vector<at::Tensor> inputs = {};
};

// A graph that has been recorded and not run backward. The same seed and options make the same
// program, values and all, each time. Not thread-safe: seeds libtorch's default generator.
struct Program {
  Program(uint64_t seed, const ProgramOptions& options);

  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_gradients;
  std::vector<at::Tensor> retained;  // not leaves, but keep their gradient
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;  // kept for their hooks

  // The names of the operators drawn.
  std::string text;
  // What each hook saw, in the order of the calls. Grows while the program runs backward.
  std::shared_ptr<std::vector<std::string>> trace = std::make_shared<std::vector<std::string>>();
};

// The names of all operators that a program may have, to see that none was left out.
std::vector<std::string> ProgramOperatorNames();

// Dtype, layout, sizes, strides and each bit of the elements. Both may be undefined.
std::string Fingerprint(const at::Tensor& tensor);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_RANDOM_PROGRAM_H_
