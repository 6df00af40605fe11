// A backward of libtorch's own inside a node, as reentrant checkpointing runs one. It adds to the
// .grad of the leaves that it finds. That is right for leaves that the node has made for itself and
// reads again; but a parameter would have its gradient there, where it is not read, and not where
// the execution leaves gradients.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NESTED_BACKWARD_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NESTED_BACKWARD_H_

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace distgrad {

// Notes, while it lives, the leaves whose .grad a backward on this thread changes. Nests: what has
// begun later notes them. For one thread.
//
// libtorch asks one function of the process for its engine. The first of these puts itself in
// between, as Python's engine does, and hands everything on; on threads without one of these it is
// never asked. (Python's, if it is imported later, takes its place, and then nothing is noted.)
// What a backward inside such a backward does on a thread of an accelerator is not seen.
class NestedBackwards {
 public:
  NestedBackwards();
  ~NestedBackwards();
  NestedBackwards(const NestedBackwards&) = delete;
  NestedBackwards& operator=(const NestedBackwards&) = delete;

  // Throws, with kFailedPrecondition, if one of the leaves noted since the last call still exists;
  // after each node.
  void CheckLeavesAreGone() {
    if (!leaves_.empty()) CheckLeaves();
  }

 private:
  class Engine;
  void CheckLeaves();

  NestedBackwards* const outer_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> leaves_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NESTED_BACKWARD_H_
