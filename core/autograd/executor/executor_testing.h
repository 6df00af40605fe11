// What the executor's tests share.
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
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
#include "core/autograd/executor/post_accumulate.h"
#include "core/autograd/executor/source_node.h"

namespace distgrad {

// A function of two results, a and 2 a, that calls one of the test's in backward with what
// arrived. Its gradient is the first one that arrived.
struct Spy : torch::autograd::Function<Spy> {
  using Body = std::function<void(const torch::autograd::variable_list&)>;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& a, Body* body, bool materialize) {
    context->set_materialize_grads(materialize);
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return {a.clone(), a * 2};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<Body*>(context->saved_data["body"].toInt()))(gradients);
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

// `a`, with `body` called when its gradient has arrived. `body` must live until then.
inline at::Tensor Watch(const at::Tensor& a, Spy::Body* body) {
  return Spy::apply(a, body, /*materialize=*/true)[0];
}

struct PreHook : torch::autograd::FunctionPreHook {
  using Body = std::function<torch::autograd::variable_list(torch::autograd::variable_list)>;
  explicit PreHook(Body b) : body(std::move(b)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    return body(gradients);
  }
  const Body body;
};

struct PostHook : torch::autograd::FunctionPostHook {
  explicit PostHook(PreHook::Body b) : body(std::move(b)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    return body(outputs);
  }
  const PreHook::Body body;
};

struct PostAccumulateHook : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulateHook(std::function<void(const at::Tensor&)> b) : body(std::move(b)) {}
  void operator()(const at::Tensor& tensor) override { body(tensor); }
  const std::function<void(const at::Tensor&)> body;
};

// Remembers all that it is given. Thread-safe while an execution runs; read it afterwards.
class RecordingSink : public GradientSink {
 public:
  struct Stop {
    torch::autograd::variable_list gradients;
    bool reached;
  };

  void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) override {
    if (on_leaf) on_leaf();
    if (HasPostAccumulateHook(leaf)) {
      CallPostAccumulateHook(
          leaf, [&] { return std::move(gradient); },
          [&](at::Tensor left) { gradient = std::move(left); });
      if (!gradient.defined()) return;
    }
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

// Makes a graph with one source for each list of tensors; the sources are the graph's indices 0, 1,
// ...
inline std::shared_ptr<const Graph> GraphOf(const std::vector<std::vector<at::Tensor>>& roots) {
  std::vector<std::shared_ptr<Graph::Node>> sources;
  for (const auto& tensors : roots) sources.push_back(std::make_shared<SourceNode>(tensors));
  return std::make_shared<const Graph>(sources, IsStop);
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_EXECUTOR_TESTING_H_
