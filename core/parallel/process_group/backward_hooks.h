// Tells of a backward of libtorch's: of the gradients that parameters get, and of its end. libtorch
// calls hooks for the former, and callbacks for the latter, but says nothing of a backward that
// fails: it only drops its callbacks.
#ifndef DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_BACKWARD_HOOKS_H_
#define DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_BACKWARD_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace distgrad {

// Hears of a backward, on its threads. What the first two throw fails the backward. Hooks and
// callbacks keep it only while they call it.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  // A parameter, by its place in the list, has another .grad than before.
  virtual void OnGradient(size_t parameter, const at::Tensor& tensor) = 0;
  // One of these three is called for each backward in which ObserveBackwardEnd() was, with the
  // number that RunningBackward() was there. Here: it has ended. It may be within another one all
  // the same, where libtorch runs it on a thread of its own: of 60 within each other the next one.
  virtual void OnBackwardEnd(int backward) = 0;
  // The backward has ended, and was called within a node of another one, which goes on.
  virtual void OnNestedBackwardEnd(int backward) = 0;
  // The backward has failed.
  virtual void OnBackwardAbandoned(int backward) = 0;
};

// The post-accumulate hooks of a list of parameters. Thread-safe, but for Add() and Remove(), which
// no backward of the parameters may run beside.
class BackwardHooks {
 public:
  // A hook that a parameter has already is called before ours. Once.
  void Add(const std::vector<at::Tensor>& parameters, std::weak_ptr<BackwardObserver> observer);
  // A hook of ours below another one stays, and does nothing once the observer is gone.
  void Remove();

 private:
  class Hook;

  std::vector<std::pair<at::Tensor, const Hook*>> hooks_;
};

// The number that libtorch gives the backward which this thread runs; -1 if it runs none.
int RunningBackward();
// Has libtorch tell `observer` of the end of the backward that this thread runs.
void ObserveBackwardEnd(std::weak_ptr<BackwardObserver> observer);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_PROCESS_GROUP_BACKWARD_HOOKS_H_
