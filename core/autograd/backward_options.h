// The options of a backward pass.
#ifndef DISTGRAD_CORE_AUTOGRAD_BACKWARD_OPTIONS_H_
#define DISTGRAD_CORE_AUTOGRAD_BACKWARD_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "core/base/deadline.h"

namespace distgrad {

struct BackwardOptions {
  // Keeps the graph for another backward of the same context; gradients of all of them add up.
  bool retain_graph = false;
  // The gradient of each root, of its shape and dtype; undefined, or none at all: ones, for roots
  // of one real element.
  std::vector<at::Tensor> root_gradients = {};
  // The pass fails with kDeadlineExceeded if it is not over by then. Default: now plus
  // WorkerOptions::timeout.
  Deadline deadline = absl::InfinitePast();
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_BACKWARD_OPTIONS_H_
