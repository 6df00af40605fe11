#include "core/autograd/executor/execution.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/ops/_is_any_true.h>
#include <ATen/ops/isnan.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/autograd/executor/gradient_slot.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// How far a node is. Thread-safe.
struct Progress {
  std::atomic<uint32_t> missing{0};  // dependencies that have not run; one for a root
  std::atomic<bool> reached{false};
};

// The nodes that one thread has made ready, in libtorch's order: the one made last in forward
// comes first, leaves before all. Not thread-safe.
class ReadyHeap {
 public:
  bool empty() const { return heap_.empty(); }

  void Push(uint64_t sequence_nr, Graph::Index node) {
    heap_.push_back({sequence_nr, node});
    std::push_heap(heap_.begin(), heap_.end());
  }

  Graph::Index Pop() {
    std::pop_heap(heap_.begin(), heap_.end());
    const Graph::Index node = heap_.back().node;
    heap_.pop_back();
    return node;
  }

 private:
  struct Item {
    uint64_t sequence_nr;
    Graph::Index node;
    bool operator<(const Item& other) const { return sequence_nr < other.sequence_nr; }
  };
  std::vector<Item> heap_;
};

// libtorch's own buffer does the addition, so that its choice of in place or not, of the order
// of sparse and dense, and so of the result's layout, is the same.
at::Tensor Sum(Node* consumer, at::Tensor held, at::Tensor gradient) {
  torch::autograd::InputBuffer buffer(1);
  buffer.buffer[0] = std::move(held);
  buffer.add(0, std::move(gradient), std::nullopt, std::nullopt, consumer);
  return std::move(buffer.buffer[0]);
}

variable_list CallTensorHooks(Node& node, variable_list gradients) {
  for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
  for (const auto& [output, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

// Before a node runs. `gradients` undergoes the hooks on tensors, then those on the node.
variable_list CallHooksBefore(Node& node, variable_list gradients) {
  gradients = CallTensorHooks(node, std::move(gradients));
  for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
  return gradients;
}

// The gradient as the leaf's .grad would hold it: laid out like the leaf, and taken without a
// copy if `gradient` and the `other_owners` known here are all that hold it.
at::Tensor OwnedGradient(const AccumulateGrad& leaf, at::Tensor gradient, size_t other_owners) {
  at::Tensor owned;
  AccumulateGrad::accumulateGrad(leaf.variable, owned, gradient, 1 + other_owners,
                                 [&owned](at::Tensor&& result) { owned = std::move(result); });
  return owned;
}

// What remains of a leaf's gradient after its post-accumulate hook; see execution.h.
at::Tensor CallPostAccumulateHook(const AccumulateGrad& leaf, at::Tensor gradient) {
  const auto& hook = leaf.tensor_post_acc_grad_hooks();
  if (hook == nullptr) return gradient;
  at::Tensor stand_in = leaf.variable.detach();
  stand_in.set_requires_grad(true);
  stand_in.mutable_grad() = std::move(gradient);
  (*hook)(stand_in);
  return std::move(stand_in.mutable_grad());
}

void CheckNoNan(const Node& node, const variable_list& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined()) continue;
    const c10::OptionalDeviceGuard guard(outputs[i].device());
    TORCH_CHECK(!at::_is_any_true(at::isnan(outputs[i])).item<bool>(), "output ", i,
                " of the backward is nan");
  }
}

}  // namespace

struct Execution::State {
  State(std::shared_ptr<const Graph> the_graph, ExecutionOptions the_options,
        GradientSink* the_sink)
      : graph(std::move(the_graph)),
        options(the_options),
        sink(the_sink),
        progress(new Progress[graph->size()]),
        inputs(new GradientSlot[graph->input_count()]) {
    thread_state.set_grad_mode(false);
    for (Graph::Index i = 0; i < graph->size(); ++i) {
      const uint32_t dependencies = graph->entry(i).dependencies;
      progress[i].missing.store(dependencies == 0 ? 1 : dependencies, std::memory_order_relaxed);
    }
  }

  // A burst begins with the first Begin() and ends when each has had its End().
  void Begin();
  void End();
  void Fail(absl::Status why);

  // The root's gradients, then all that they make ready.
  void Run(Graph::Index root, variable_list gradients, bool reached);
  void RunNode(Graph::Index node, variable_list gradients, ReadyHeap& ready);
  void RunLeaf(AccumulateGrad& leaf, variable_list gradients);
  variable_list RunOperator(Node& node, variable_list gradients);
  // One edge has been followed: adds `gradient`, and puts the node in `ready` if it was the last.
  void Arrive(Graph::Successor at, at::Tensor gradient, bool reached, ReadyHeap& ready);

  // Constant after construction.
  const std::shared_ptr<const Graph> graph;
  const ExecutionOptions options;
  GradientSink* const sink;
  at::ThreadLocalState thread_state;

  // Synchronize themselves.
  const std::unique_ptr<Progress[]> progress;    // by node
  const std::unique_ptr<GradientSlot[]> inputs;  // by input
  std::atomic<bool> stopped{false};

  absl::Mutex mu;
  // Guarded by mu.
  absl::Status status ABSL_GUARDED_BY(mu);
  int running ABSL_GUARDED_BY(mu) = 0;
  bool in_on_idle ABSL_GUARDED_BY(mu) = false;
  bool idle_again ABSL_GUARDED_BY(mu) = false;  // a burst ended while OnIdle was being called
};

void Execution::State::Begin() {
  absl::MutexLock lock(&mu);
  ++running;
}

void Execution::State::End() {
  {
    absl::MutexLock lock(&mu);
    if (--running > 0) return;
    if (in_on_idle) {
      idle_again = true;
      return;
    }
    in_on_idle = true;
  }
  while (true) {
    sink->OnIdle();
    absl::MutexLock lock(&mu);
    // A burst that is under way again will come here itself.
    in_on_idle = idle_again && running == 0;
    idle_again = false;
    if (!in_on_idle) return;
  }
}

void Execution::State::Fail(absl::Status why) {
  absl::MutexLock lock(&mu);
  if (!status.ok()) return;
  status = std::move(why);
  stopped.store(true, std::memory_order_relaxed);
}

void Execution::State::Run(Graph::Index root, variable_list gradients, bool reached) {
  const at::ThreadLocalStateGuard guard(thread_state);
  ReadyHeap ready;
  const Graph::Entry& entry = graph->entry(root);
  if (gradients.size() != entry.input_count) {
    Fail(absl::InvalidArgumentError(absl::StrCat("a root with ", entry.input_count,
                                                 " inputs was fed ", gradients.size(),
                                                 " gradients")));
    return;
  }
  if (progress[root].missing.exchange(0, std::memory_order_relaxed) != 1) {
    Fail(absl::InternalError("a root was fed twice"));
    return;
  }
  progress[root].reached.store(reached, std::memory_order_relaxed);
  RunNode(root, std::move(gradients), ready);
  while (!ready.empty() && !stopped.load(std::memory_order_relaxed)) {
    const Graph::Index node = ready.Pop();
    const Graph::Entry& next = graph->entry(node);
    variable_list inputs_of_node(next.input_count);
    for (uint32_t i = 0; i < next.input_count; ++i) {
      inputs_of_node[i] = inputs[next.first_input + i].Take();
    }
    RunNode(node, std::move(inputs_of_node), ready);
  }
}

void Execution::State::RunNode(Graph::Index index, variable_list gradients, ReadyHeap& ready) {
  const Graph::Entry& entry = graph->entry(index);
  Node& node = *entry.node;
  const bool reached = progress[index].reached.load(std::memory_order_relaxed);
  try {
    switch (entry.kind) {
      case Graph::Kind::kLeaf:
        if (reached) RunLeaf(static_cast<AccumulateGrad&>(node), std::move(gradients));
        return;
      case Graph::Kind::kStop:
        if (reached) gradients = CallTensorHooks(node, std::move(gradients));
        sink->OnStop(node, std::move(gradients), reached);
        return;
      case Graph::Kind::kOperator:
        break;
    }
    const absl::Span<const Graph::Successor> successors = graph->successors(index);
    variable_list outputs =
        reached ? RunOperator(node, std::move(gradients)) : variable_list(successors.size());
    TORCH_CHECK(outputs.size() == successors.size(), "a hook changed the number of gradients to ",
                outputs.size(), " from ", successors.size());
    for (size_t i = 0; i < successors.size(); ++i) {
      if (successors[i].node == Graph::kNone) continue;
      Arrive(successors[i], std::move(outputs[i]), reached, ready);
    }
  } catch (...) {
    const absl::Status error = StatusFromException(std::current_exception());
    if (torch::autograd::AnomalyMode::is_enabled()) node.metadata()->print_stack(node.name());
    Fail(absl::Status(error.code(), absl::StrCat(node.name(), ": ", error.message())));
  }
}

void Execution::State::RunLeaf(AccumulateGrad& leaf, variable_list gradients) {
  gradients = CallHooksBefore(leaf, std::move(gradients));
  // Hooks after the node are shown what went in.
  const variable_list inputs_of_leaf = leaf.post_hooks().empty() ? variable_list() : gradients;
  TORCH_CHECK(gradients.size() == 1, "expected 1 gradient, got ", gradients.size());
  if (gradients[0].defined() && leaf.variable.requires_grad()) {
    at::Tensor gradient = OwnedGradient(leaf, std::move(gradients[0]), inputs_of_leaf.size());
    gradient = CallPostAccumulateHook(leaf, std::move(gradient));
    if (gradient.defined()) sink->OnLeaf(leaf, std::move(gradient));
  }
  variable_list outputs;
  for (const auto& hook : leaf.post_hooks()) outputs = (*hook)(outputs, inputs_of_leaf);
}

variable_list Execution::State::RunOperator(Node& node, variable_list gradients) {
  gradients = CallHooksBefore(node, std::move(gradients));
  if (!options.retain_graph) node.will_release_variables();
  variable_list outputs;
  if (node.post_hooks().empty()) {
    outputs = node(std::move(gradients));
  } else {
    outputs = node(variable_list(gradients));
  }
  torch::autograd::validate_outputs(
      node.next_edges(), outputs, [&node](const std::string& message) {
        return absl::StrCat("Function ", node.name(), " returned an ", message);
      });
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, gradients);
  if (!options.retain_graph) node.release_variables();
  if (torch::autograd::AnomalyMode::is_enabled() &&
      torch::autograd::AnomalyMode::should_check_nan()) {
    CheckNoNan(node, outputs);
  }
  return outputs;
}

void Execution::State::Arrive(Graph::Successor at, at::Tensor gradient, bool reached,
                              ReadyHeap& ready) {
  const Graph::Entry& entry = graph->entry(at.node);
  Progress& node = progress[at.node];
  inputs[entry.first_input + at.input].Add(
      std::move(gradient), [&entry](at::Tensor held, at::Tensor more) {
        return Sum(entry.node.get(), std::move(held), std::move(more));
      });
  if (reached) node.reached.store(true, std::memory_order_relaxed);
  // The last to count down sees what all others stored before they did.
  if (node.missing.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    ready.Push(entry.node->sequence_nr(), at.node);
  }
}

Execution::Execution(std::shared_ptr<const Graph> graph, ExecutionOptions options,
                     GradientSink* sink)
    : state_(std::make_shared<State>(std::move(graph), options, sink)) {}

Execution::~Execution() = default;

void Execution::Feed(Graph::Index root, variable_list gradients, bool reached) {
  const std::shared_ptr<State> state = state_;
  state->Begin();
  if (!state->stopped.load(std::memory_order_relaxed)) {
    state->Run(root, std::move(gradients), reached);
  }
  state->End();
}

void Execution::Cancel(absl::Status why) { state_->Fail(std::move(why)); }

absl::Status Execution::status() const {
  absl::MutexLock lock(&state_->mu);
  return state_->status;
}

bool Execution::idle() const {
  absl::MutexLock lock(&state_->mu);
  return state_->running == 0;
}

}  // namespace distgrad
