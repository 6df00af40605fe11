// What the executor's tests share.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/autograd/executor/source_node.h"

namespace distgrad {

// Remembers all that it is given. Thread-safe while an execution runs; read it afterwards.
class RecordingSink : public GradientSink {
 public:
  struct Stop {
    torch::autograd::variable_list gradients;
    bool reached;
  };

  void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) override {
    if (on_leaf) on_leaf();
    const std::lock_guard<std::mutex> lock(mu_);
    leaves[leaf.variable.unsafeGetTensorImpl()].push_back(std::move(gradient));
  }
  void OnStop(torch::autograd::Node& stop, torch::autograd::variable_list gradients,
              bool reached) override {
    if (on_stop) on_stop();
    const std::lock_guard<std::mutex> lock(mu_);
    stops[&stop].push_back({std::move(gradients), reached});
  }
  void OnIdle() override {
    ++idle;
    if (on_idle) on_idle();
  }

  // The gradient of a leaf that got exactly one; else undefined.
  at::Tensor Of(const at::Tensor& leaf) const {
    const auto it = leaves.find(leaf.unsafeGetTensorImpl());
    return it == leaves.end() || it->second.size() != 1 ? at::Tensor() : it->second[0];
  }

  std::function<void()> on_leaf, on_stop, on_idle;
  std::map<const at::TensorImpl*, std::vector<at::Tensor>> leaves;
  std::map<const torch::autograd::Node*, std::vector<Stop>> stops;
  int idle = 0;

 private:
  std::mutex mu_;
};

// A node at which the traversal ends, as a RecvNode does.
class StopNode : public torch::autograd::Node {
 public:
  // Makes this node the history of `tensor`, as its next input.
  static void MakeHistory(const std::shared_ptr<StopNode>& stop, at::Tensor tensor) {
    torch::autograd::create_gradient_edge(tensor, stop);
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK(false, "a stop node was run");
  }
  std::string name() const override { return "StopNode"; }
};

inline bool IsStop(torch::autograd::Node& node) {
  return dynamic_cast<StopNode*>(&node) != nullptr;
}

// One source for each list of tensors; the sources are the graph's indices 0, 1, ...
inline std::shared_ptr<const Graph> GraphOf(const std::vector<std::vector<at::Tensor>>& roots) {
  std::vector<std::shared_ptr<Graph::Node>> sources;
  for (const auto& tensors : roots) sources.push_back(std::make_shared<SourceNode>(tensors));
  return std::make_shared<const Graph>(sources, IsStop);
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_
