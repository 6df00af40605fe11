// One run of a local autograd graph: gradients are fed to its roots, one after the other or at
// the same time, each node runs when all that it depends on has run, and what arrives at leaves
// and stop nodes goes to a sink. Knows nothing of workers.
//
// An input of a root is *reached* or not, as the caller that feeds the root says; and a node is if
// a path of nodes leads to it from a reached input. A node that is not reached does not run; it
// only passes that on, so that the leaves behind an unused result get nothing at all, as in local
// autograd, where nothing leads from the loss to them.
//
// Does what torch::autograd::backward does, in the same order, so that gradients are equal to
// the last bit when roots are fed from one thread: all kinds of hooks, checks of what a node
// returns, release of what nodes saved, anomaly mode. Differences:
//
// - A leaf's gradient goes to the sink and never to its .grad, but for the time in which the leaf's
//   post-accumulate hook runs: the sink calls that (post_accumulate.h).
// - A post-hook that changes how many gradients a node has fails the execution.
// - libtorch's notions of "the current node" and "the current graph task" are not set, since it
//   does not export them: get_current_node() is null in a node, and Engine::queue_callback
//   fails. A backward inside a node is libtorch's own. It works on leaves that the node makes for
//   itself; if it adds to the .grad of one that outlives the node, the execution fails, for that
//   gradient would not go to the sink (nested_backward.h).
//
// A node whose input is on an accelerator runs on the stream on which forward made that input,
// and with DeviceThreads on that device's thread; a node of the CPU that becomes ready there is
// handed to the pool. A gradient is fed, and given to the sink, in the order of the current
// stream of its device: nothing here waits for a device.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/autograd/executor/device_threads.h"
#include "core/autograd/executor/graph.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace distgrad {

// The place where gradients leave the graph. Called on the threads that run nodes, several at once
// for different nodes; exactly once for every leaf and stop node of an execution that is not
// cancelled.
class GradientSink {
 public:
  virtual ~GradientSink() = default;

  // Takes the sum of what arrived at a leaf, never undefined; not called for a leaf that got
  // nothing. If the leaf has a post-accumulate hook, the sink calls it, as it alone knows the
  // gradient so far. The tensor is the sink's to keep, and what the leaf's .grad would be after a
  // first backward: laid out like the leaf, and not shared where libtorch would not share it
  // either. May throw: that fails the execution.
  virtual void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) = 0;

  // What arrived at a stop node, one tensor (or undefined) per input; `reached` false means
  // that no gradient will come, and then all are undefined. The node's hooks of all kinds have run,
  // as if it were a function that hands on what it is given. May throw: that fails the execution.
  virtual void OnStop(torch::autograd::Node& stop, torch::autograd::variable_list gradients,
                      bool reached) = 0;

  // The calling thread is about to run `next`, which is reached; or, where that is null, has
  // run all that was handed to it, or stopped at an error, and goes away, while other threads go
  // on. What the sink keeps back, and the error, must not wait for that. May throw, unless `next`
  // is null: that fails the execution.
  virtual void OnNext(torch::autograd::Node* next) {}

  // The calling thread is about to wait within a node or a hook, under whatever locks that has;
  // others may have nothing to do but what the sink keeps back. Must not wait, but
  // for memory, nor throw.
  virtual void OnWait() {}

  // Nothing is running any more: every root fed so far has been followed to its end (or the
  // execution was cancelled). More roots may be fed later, also by this call, and then it comes
  // again. Never called twice at a time. The execution may be destroyed by it or after it.
  virtual void OnIdle() = 0;
};

struct ExecutionOptions {
  // Keeps what nodes saved in forward, so that the graph can be run again.
  bool retain_graph = false;
  // Must outlive the execution. Without it all nodes run on the threads that feed.
  DeviceThreads* device_threads = nullptr;
  // An object, say the sink's owner, that is kept until the last OnIdle has returned.
  std::shared_ptr<void> keep_alive = nullptr;
  // Nodes of which each may allocate so many bytes at most (core/tensor/allocation_limit.h), and
  // the same for adding two gradients up for it; by index. Empty: none.
  std::vector<bool> limited = {};
  uint64_t limit_bytes = 0;
  absl::string_view limit_name = "";  // in errors; outlives the execution
};

// Whether nodes may run on the calling thread. Not within a node or a post-accumulate hook: the
// thread holds that node's mutex, which a node that it ran might wait for (node_turn.h). Nor where
// libtorch's own engine runs something for torch::autograd::grad(), or a backward() with inputs:
// there libtorch's nodes ask a thread-local, which cannot be set from outside, which of their
// outputs lead to those inputs, and leave out the others without an error.
bool MayRunNodesHere();

// Thread-safe.
class Execution {
 public:
  // `sink` must outlive the last OnIdle. The nodes run in the thread-local state that is given, by
  // default that of the calling thread (autocast and the like), with gradient mode off.
  Execution(std::shared_ptr<const Graph> graph, ExecutionOptions options, GradientSink* sink,
            const at::ThreadLocalState& thread_state = {});
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Feeds a root: for each of its inputs one gradient (or undefined), and whether it is reached;
  // what is not has no gradient. Only where MayRunNodesHere(); else the execution fails. Runs on
  // this thread all that this makes ready, but for what has a device thread; OnIdle says when that
  // has ended too. Each root that the graph was built from must be fed exactly once. `root` is an
  // index of the graph.
  void Feed(Graph::Index root, torch::autograd::variable_list gradients,
            absl::Span<const bool> reached);

  // Stops before the next node; what is fed later is dropped, but still ends in OnIdle. The
  // first status wins. Waits for nothing.
  void Cancel(absl::Status why);

  // Returns OK until a node, a hook or the sink throws, or Cancel. The message of a node's error
  // begins with the node's name; the code is that of StatusFromException.
  absl::Status status() const;

  // Whether no node is running or about to.
  bool idle() const;

 private:
  struct State;
  // Shared with running Feeds, so that OnIdle may let go of the execution.
  const std::shared_ptr<State> state_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTION_H_
