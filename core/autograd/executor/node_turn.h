// The turn to run a node. libtorch holds a mutex of the node's meanwhile, and the user's code runs
// under it: a custom function's backward, a hook on a saved tensor. That code may wait for another
// worker, which may need what another pass that has come to the same node would keep, if it waited
// for that mutex as libtorch does: a thread of a pool, or the sockets.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_TURN_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_TURN_H_

#include <torch/csrc/autograd/function.h>

namespace distgrad {

// The right to run a node, which one thread of the process has at a time: the thread that has it
// finds the node's mutex free, unless libtorch's own engine runs the node. Waits for it in a
// BlockingScope, so that no work needs the thread that waits.
//
// The thread that has a turn runs no other node (MayRunNodesHere), which could need the same one.
// Stays on its thread.
class NodeTurn {
 public:
  explicit NodeTurn(const torch::autograd::Node& node);
  ~NodeTurn();
  NodeTurn(const NodeTurn&) = delete;
  NodeTurn& operator=(const NodeTurn&) = delete;

  // Whether the calling thread has a turn.
  static bool IsHeldHere();

 private:
  const torch::autograd::Node* const node_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_NODE_TURN_H_
