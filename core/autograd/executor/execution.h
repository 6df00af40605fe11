// One run of a local autograd graph: gradients are fed to its roots, one after the other or at
// the same time, each node runs when all that it depends on has run, and what arrives at leaves
// and stop nodes goes to a sink. Knows nothing of workers.
//
// A node is *reached* if a root was fed a gradient and a path of nodes that ran leads from
// there. A node that is not reached does not run; it only passes that on, so that the leaves
// behind an unused result get nothing at all, as in local autograd.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>

#include "absl/status/status.h"
#include "core/autograd/executor/graph.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace distgrad {

// Where gradients leave the graph. Called on the threads that run nodes, several at once for
// different nodes; exactly once for every leaf and stop node of an execution that is not
// cancelled.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  // The sum of what arrived at a leaf, never undefined; not called for a leaf that got nothing.
  // The tensor is the sink's to keep. May throw: that fails the execution.
  virtual void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) = 0;

  // What arrived at a stop node, one tensor (or undefined) per input; `reached` false means
  // that no gradient will come, and then all are undefined.
  virtual void OnStop(torch::autograd::Node& stop, torch::autograd::variable_list gradients,
                      bool reached) = 0;

  // Nothing is running any more: every root fed so far has been followed to its end (or the
  // execution was cancelled). More roots may be fed later, and then this is called again. The
  // last thing that the execution does in this burst.
  virtual void OnIdle() = 0;
};

struct ExecutionOptions {
  // Keep what nodes saved in forward, so that the graph can be run again.
  bool retain_graph = false;
};

// Thread-safe.
class Execution {
 public:
  // `sink` must outlive the execution. Takes the thread-local state of the calling thread
  // (autocast and the like) for its nodes; they run with gradient mode off.
  Execution(std::shared_ptr<const Graph> graph, ExecutionOptions options, GradientSink* sink);
  ~Execution();

  // Feeds a root: one gradient (or undefined) for each of its inputs, and whether it is reached
  // at all. Runs on this thread all that this makes ready. Each root that the graph was built
  // from must be fed exactly once. `root` is an index of the graph.
  void Feed(Graph::Index root, torch::autograd::variable_list gradients, bool reached);

  // Stops before the next node; what is fed later is dropped. The first status wins.
  void Cancel(absl::Status why);

  // OK until a node throws, or Cancel. The message of a node's error names the node.
  absl::Status status() const;

  // Whether no node is running or about to.
  bool idle() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_
