// The gradients of parameters that several stages have. Private to core/pipeline.
#ifndef DISTGRAD_CORE_PIPELINE_TIED_GRADIENTS_H_
#define DISTGRAD_CORE_PIPELINE_TIED_GRADIENTS_H_

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <map>

namespace distgrad {

// Returns the sum of two gradients of a parameter, each of which may be sparse, in memory of its
// own. All ranks get the same sum of the same gradients, to the last bit.
inline at::Tensor SumOfGradients(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_sparse() == b.is_sparse()) return a + b;
  // torch adds sparse to dense, not the other way round.
  const at::Tensor& dense = a.is_sparse() ? b : a;
  const at::Tensor& sparse = a.is_sparse() ? a : b;
  // On a GPU rows that occur twice are added by atomics, in any order.
  return dense + (sparse.is_cuda() ? sparse.coalesce() : sparse);
}

// Adds up the gradients of some parameters apart from the context, until those of other ranks are
// added to them. For one thread at a time.
class TiedGradients {
 public:
  void Watch(const at::Tensor& parameter) { sums_[parameter.unsafeGetTensorImpl()]; }

  // Takes the gradient of a parameter that is watched; false for any other leaf.
  bool Add(const at::Tensor& leaf, const at::Tensor& gradient) {
    const auto found = sums_.find(leaf.unsafeGetTensorImpl());
    if (found == sums_.end()) return false;
    at::Tensor& sum = found->second;
    // Not in place: the first one may be a tensor that others have.
    sum = sum.defined() ? SumOfGradients(sum, gradient) : gradient.detach();
    return true;
  }

  // Undefined if nothing was added.
  at::Tensor Of(const at::Tensor& parameter) const {
    const auto found = sums_.find(parameter.unsafeGetTensorImpl());
    return found == sums_.end() ? at::Tensor() : found->second;
  }

 private:
  std::map<const c10::TensorImpl*, at::Tensor> sums_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_TIED_GRADIENTS_H_
