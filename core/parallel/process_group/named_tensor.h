// A parameter or a buffer of a model.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NAMED_TENSOR_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NAMED_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <string>

namespace distgrad {

// A parameter or a buffer, and what messages call it.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  // Whether its gradient is sparse: it goes alone, and nothing but its nonzero rows is sent; so it
  // has at least one dimension. A sparse gradient of any other parameter becomes dense.
  bool sparse_gradient = false;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_NAMED_TENSOR_H_
