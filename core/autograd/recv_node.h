// The node by which a tensor that came from another worker enters the local graph. In backward a
// gradient that reaches this node is sent to the send node at the other end of its edge.
#ifndef DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_
#define DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <typeinfo>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "core/autograd/pass.h"
#include "core/base/ids.h"

namespace distgrad {

class RecvNode;

// The worker that a context's record, or a recv node, is of. Numbers of contexts are those of a
// job: two jobs, of which one process may have workers, give the same ones, but not to workers of
// the same incarnation.
struct ContextHolder {
  WorkerRank rank = 0;
  Incarnation incarnation = 0;

  friend bool operator==(ContextHolder a, ContextHolder b) {
    return a.rank == b.rank && a.incarnation == b.incarnation;
  }
  friend bool operator!=(ContextHolder a, ContextHolder b) { return !(a == b); }
};

// The recv nodes of one edge, one for each tensor: a hook on the node of one tensor has nothing to
// do with the others of its message, as in one process, where each has a node of its own.
using RecvNodes = absl::InlinedVector<std::shared_ptr<RecvNode>, 1>;

// Immutable after construction.
class RecvNode final : public torch::autograd::Node {
 public:
  // Makes a node for each of `tensors` (defined, floating or complex, without history), and sets it
  // as the tensor's history. `holder` is the worker that has received them.
  static RecvNodes Attach(ContextId context, ContextHolder holder, EdgeEnd end,
                          absl::Span<at::Tensor> tensors);

  static bool Is(const torch::autograd::Node& node) { return typeid(node) == typeid(RecvNode); }

  ContextId context() const { return context_; }
  ContextHolder holder() const { return holder_; }
  EdgeEnd end() const { return end_; }
  // The place of its tensor among the edge's, and the number of those.
  size_t place() const { return place_; }
  size_t edge_size() const { return edge_size_; }

  // Throws: only our own engine can follow the edge to the other worker.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override;

 private:
  RecvNode(ContextId context, ContextHolder holder, EdgeEnd end, size_t place, size_t edge_size)
      : context_(context), holder_(holder), end_(end), place_(place), edge_size_(edge_size) {}

  const ContextId context_;
  const ContextHolder holder_;
  const EdgeEnd end_;
  const size_t place_;
  const size_t edge_size_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_RECV_NODE_H_
