// Puts an engine around libtorch's own that sees the backwards which begin in a node.
#include "core/autograd/executor/nested_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <atomic>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local NestedBackwards* current = nullptr;

// Those of the edges that lead to leaves.
std::vector<at::Tensor> LeavesAt(const edge_list& edges) {
  std::vector<at::Tensor> leaves;
  for (const Edge& edge : edges) {
    if (!edge.is_valid()) continue;
    Node& function = *edge.function;
    if (typeid(function) == typeid(AccumulateGrad)) {
      leaves.push_back(static_cast<AccumulateGrad&>(function).variable);
    }
  }
  return leaves;
}

// All leaves that a backward from `roots` may add to.
std::vector<at::Tensor> LeavesOf(const edge_list& roots) {
  std::vector<at::Tensor> leaves;
  absl::flat_hash_set<const Node*> seen;
  std::vector<Node*> to_visit;
  const auto visit = [&](const edge_list& edges) {
    for (const Edge& edge : edges) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) {
        to_visit.push_back(edge.function.get());
      }
    }
  };
  visit(roots);
  while (!to_visit.empty()) {
    Node* const node = to_visit.back();
    to_visit.pop_back();
    if (typeid(*node) == typeid(AccumulateGrad)) {
      leaves.push_back(static_cast<AccumulateGrad*>(node)->variable);
    }
    visit(node->next_edges());
  }
  return leaves;
}

// What one can see of a leaf's .grad without looking at its elements: the tensor, and its version,
// which one of inference mode lacks.
using State = std::pair<const c10::TensorImpl*, std::optional<int64_t>>;

State StateOf(const at::Tensor& leaf) {
  // Passes and optimizers have theirs there for a while, under the leaf's mutex. It may be this
  // thread that does.
  std::optional<LeavesLock> lock;
  if (!IsCallingPostAccumulateHookOf(leaf)) lock.emplace(absl::MakeConstSpan(&leaf, 1));
  const at::Tensor& gradient = leaf.grad();
  const c10::TensorImpl* const tensor = gradient.unsafeGetTensorImpl();
  if (!gradient.defined()) return {tensor, 0};
  if (gradient.is_inference()) return {tensor, std::nullopt};
  return {tensor, gradient._version()};
}

}  // namespace

// Thread-safe.
class NestedBackwards::Engine final : public torch::autograd::Engine {
 public:
  // Once for the process; lives to its end, since libtorch may ask for it until then.
  static void Install() {
    static const bool installed = [] {
      watching_.store(new Engine(torch::autograd::Engine::get_default_engine()),
                      std::memory_order_release);
      torch::autograd::set_default_engine_stub(Choose);
      return true;
    }();
    (void)installed;
  }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    const auto run = [&] {
      return before_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    };
    // torch::autograd::grad() leaves every .grad alone.
    if (!accumulate_grad || current == nullptr) return run();
    // With `outputs` it adds to those alone.
    const std::vector<at::Tensor> leaves = outputs.empty() ? LeavesOf(roots) : LeavesAt(outputs);
    std::vector<State> states;
    for (const at::Tensor& leaf : leaves) states.push_back(StateOf(leaf));
    const auto note = [&] {
      for (size_t i = 0; i < leaves.size(); ++i) {
        const State state = StateOf(leaves[i]);
        // Without a version it may have been added to, and most likely was: the backward led there.
        if (state != states[i] || !state.second.has_value()) {
          current->leaves_.emplace_back(leaves[i].getIntrusivePtr());
        }
      }
    };
    variable_list results;
    try {
      results = run();
    } catch (...) {  // which the node may catch
      note();
      throw;
    }
    note();
    return results;
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, std::shared_ptr<Node> root,
      torch::autograd::InputBuffer&& inputs) override {
    return before_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return before_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return before_.get_default_saved_variable_hooks();
  }

 private:
  explicit Engine(torch::autograd::Engine& before) : before_(before) {}

  static torch::autograd::Engine& Choose() {
    Engine& watching = *watching_.load(std::memory_order_acquire);
    return current == nullptr ? watching.before_ : watching;
  }

  static std::atomic<Engine*> watching_;

  torch::autograd::Engine& before_;  // libtorch's own, or what was in its place before
};

std::atomic<NestedBackwards::Engine*> NestedBackwards::Engine::watching_ = nullptr;

NestedBackwards::NestedBackwards() : outer_(current) {
  Engine::Install();
  current = this;
}

NestedBackwards::~NestedBackwards() { current = outer_; }

void NestedBackwards::CheckLeaves() {
  for (const auto& noted : std::exchange(leaves_, {})) {
    const auto leaf = noted.lock();
    if (leaf == nullptr) continue;
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "a backward within this node added to the .grad of a leaf of shape [",
        absl::StrJoin(leaf->sizes(), ", "),
        "] that other code has too, a parameter perhaps, and whose gradient would be missing from "
        "the context; let the function take that leaf as an input and return its gradient, which "
        "torch::autograd::grad gives, or recompute in hooks on saved tensors, without a backward "
        "of its own")));
  }
}

}  // namespace distgrad
