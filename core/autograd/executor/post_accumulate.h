// Post-accumulate hooks of leaves, called as libtorch's AccumulateGrad calls them.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_POST_ACCUMULATE_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_POST_ACCUMULATE_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace torch::autograd {
struct AccumulateGrad;
struct Node;
}  // namespace torch::autograd

namespace distgrad {

bool HasPostAccumulateHook(const torch::autograd::AccumulateGrad& leaf);

// A hook of ours that is about a leaf's .grad alone. Contexts call the one that was there before.
class GradHook : public torch::autograd::PostAccumulateGradHook {
 public:
  // The hook that was there before; null if there was none.
  virtual torch::autograd::PostAccumulateGradHook* earlier() const = 0;
};

// Holds the mutexes of leaves, as libtorch does while it accumulates there and calls hooks: for a
// caller that has other gradients in their .grad for a while. Waits in a BlockingScope.
class LeavesLock {
 public:
  // Tensors that are no leaves, or need no gradient, have no mutex.
  explicit LeavesLock(absl::Span<const at::Tensor> leaves);
  ~LeavesLock();
  LeavesLock(const LeavesLock&) = delete;
  LeavesLock& operator=(const LeavesLock&) = delete;

 private:
  // The leaves' nodes, each once, in one order, so that no two locks wait for each other.
  std::vector<std::shared_ptr<torch::autograd::Node>> nodes_;
};

// Calls `accumulate`, which returns the leaf's gradient so far, and the hook of a leaf that has one
// with that as the leaf's .grad: a hook may well know the leaf itself, as an optimizer does whose
// step() and zero_grad() it calls. Gives `keep` what the hook leaves there (undefined for nothing),
// and puts back what was in .grad. The leaf's mutex is held meanwhile, as libtorch holds it, so
// that no other thread accumulates there; a thread waits for it in a BlockingScope. Throws what a
// hook throws.
void CallPostAccumulateHook(torch::autograd::AccumulateGrad& leaf,
                            absl::FunctionRef<at::Tensor()> accumulate,
                            absl::FunctionRef<void(at::Tensor)> keep);

// Whether this thread is in such a call.
bool IsCallingPostAccumulateHook();
// Whether it is in one for that leaf: it holds the leaf's mutex, and what the leaf has in .grad is
// not libtorch's.
bool IsCallingPostAccumulateHookOf(const at::Tensor& leaf);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_POST_ACCUMULATE_H_
