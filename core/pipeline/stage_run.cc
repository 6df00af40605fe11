// Runs a stage's graph from its outputs, and cuts it where halves are to be run apart.
#include "core/pipeline/stage_run.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/graph.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

template <typename T, typename... Arguments>
std::shared_ptr<T> MakeNode(Arguments&&... arguments) {
  // deleteNode frees a long chain of nodes without recursion.
  return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                            torch::autograd::deleteNode);
}

bool HasHooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         !node.pre_hooks().empty() || !node.post_hooks().empty();
}

// The states of default generators.
struct RandomStates {
  static RandomStates Of(const Tensors& tensors) {
    RandomStates states;
    states.Add(at::Device(at::kCPU));
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) states.Add(tensor.device());
    }
    return states;
  }
  // Those of the same generators at this moment.
  RandomStates Now() const {
    RandomStates states;
    for (const auto& [device, state] : all) states.Add(device);
    return states;
  }
  void Set() const {
    for (const auto& [device, state] : all) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::scoped_lock lock(generator.mutex());
      generator.set_state(state);
    }
  }
  friend bool operator==(const RandomStates& a, const RandomStates& b) {
    for (size_t i = 0; i < a.all.size(); ++i) {
      if (!at::equal(a.all[i].second, b.all[i].second)) return false;
    }
    return true;
  }

  // Whether each generator has the state that it has in one of the two.
  bool IsOfEither(const RandomStates& a, const RandomStates& b) const {
    for (size_t i = 0; i < all.size(); ++i) {
      if (!at::equal(all[i].second, a.all[i].second) && !at::equal(all[i].second, b.all[i].second))
        return false;
    }
    return true;
  }

  std::vector<std::pair<at::Device, at::Tensor>> all;

 private:
  void Add(at::Device device) {
    for (const auto& [known, state] : all) {
      if (known == device) return;
    }
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::scoped_lock lock(generator.mutex());
    all.emplace_back(device, generator.get_state());
  }
};

// What has to be the same in both runs of a function.
std::string InWords(const at::Tensor& output, bool has_history) {
  if (!output.defined()) return "not there";
  return c10::str(output.scalar_type(), " ", output.sizes(), has_history ? " with" : " without",
                  " a gradient");
}

}  // namespace

// What a second run of the function needs.
struct StageRun::Again {
  std::function<Tensors(Tensors)> function;
  Tensors inputs;
  std::vector<bool> wanted;
  RandomStates before, after;        // the first run
  std::vector<std::string> outputs;  // of the first run, in words
};

StageRun::StageRun() = default;
StageRun::StageRun(StageRun&&) noexcept = default;
StageRun& StageRun::operator=(StageRun&&) noexcept = default;
StageRun::~StageRun() = default;

// The history of an input.
class StageRun::InputNode final : public torch::autograd::Node {
 public:
  explicit InputNode(size_t place) : place_(place) {}
  size_t place() const { return place_; }
  variable_list apply(variable_list&&) override {
    TORCH_CHECK(
        false, "the graph leads to an input of a pipeline's stage: its backward is the pipeline's");
  }
  std::string name() const override { return "distgrad::StageInput"; }

 private:
  const size_t place_;
};

// The root of the second half: hands gradients on to its edges.
class StageRun::EntryNode final : public torch::autograd::Node {
 public:
  explicit EntryNode(const std::vector<Entry>& entries) {
    for (const auto& [edge, gradient] : entries) {
      input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
      add_next_edge(edge);
    }
  }
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "distgrad::StageEntry"; }
};

// Stands where an edge led that the first half does not follow.
class StageRun::CaptureNode final : public torch::autograd::Node {
 public:
  explicit CaptureNode(Edge edge) : edge_(std::move(edge)) {
    input_metadata_.emplace_back(edge_.function->input_metadata(edge_.input_nr));
  }
  const Edge& edge() const { return edge_; }
  variable_list apply(variable_list&&) override { TORCH_CHECK(false, "a capture node was run"); }
  std::string name() const override { return "distgrad::StageCapture"; }

 private:
  const Edge edge_;
};

// Keeps what arrives at a node that the second half runs once more.
class StageRun::CaptureHook final : public torch::autograd::FunctionPreHook {
 public:
  CaptureHook(std::weak_ptr<Node> node, std::vector<Entry>* entries)
      : node_(std::move(node)), entries_(entries) {}
  variable_list operator()(const variable_list& gradients) override {
    const std::shared_ptr<Node> node = node_.lock();
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      entries_->push_back({Edge(node, i), gradients[i]});
    }
    return gradients;
  }

 private:
  const std::weak_ptr<Node> node_;
  std::vector<Entry>* const entries_;
};

// A node that runs in both halves, without the edges of the second one while the first runs.
struct StageRun::Split {
  std::shared_ptr<Node> node;
  std::vector<std::pair<size_t, Edge>> weights;
};

class StageRun::Sink final : public GradientSink {
 public:
  Sink(const std::vector<std::shared_ptr<InputNode>>& inputs, Leaves leaves,
       std::vector<Entry>* entries)
      : inputs_(inputs), leaves_(leaves), entries_(entries), gradients_(inputs.size()) {}

  void OnLeaf(torch::autograd::AccumulateGrad& leaf, at::Tensor gradient) override {
    TORCH_CHECK(leaves_.context != nullptr, "the backward of inputs has come to a leaf");
    if (*leaves_.check != nullptr) {
      const absl::Status allowed = (*leaves_.check)(leaf.variable);
      if (!allowed.ok()) throw StatusError(allowed);
    }
    if (leaves_.tied != nullptr && leaves_.tied->Add(leaf.variable, gradient)) return;
    leaves_.context->Accumulate(leaf, std::move(gradient));
  }
  void OnStop(Node& stop, variable_list gradients, bool reached) override {
    if (!reached) return;
    // Undefined ones, too: what lies behind may make zeros of them, and its hooks are called.
    if (auto* const capture = dynamic_cast<CaptureNode*>(&stop)) {
      entries_->push_back({capture->edge(), std::move(gradients[0])});
      return;
    }
    if (!gradients[0].defined()) return;
    auto& input = static_cast<InputNode&>(stop);
    TORCH_CHECK(input.place() < inputs_.size() && inputs_[input.place()].get() == &input,
                "the stage's function has used an input of another micro-batch or of another "
                "stage, to which no gradient can go; detach what it keeps");
    gradients_[input.place()] = std::move(gradients[0]);
  }
  void OnIdle() override {}

  static bool IsStop(Node& node) {
    return dynamic_cast<InputNode*>(&node) != nullptr ||
           dynamic_cast<CaptureNode*>(&node) != nullptr;
  }
  Tensors TakeGradients() { return std::move(gradients_); }

 private:
  const std::vector<std::shared_ptr<InputNode>>& inputs_;
  const Leaves leaves_;
  std::vector<Entry>* const entries_;
  Tensors gradients_;
};

Tensors StageRun::Forward(const std::function<Tensors(Tensors)>& function, Tensors inputs,
                          const std::vector<bool>& wanted) {
  const at::AutoGradMode grad_mode(true);
  inputs_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::shared_ptr<InputNode>& node = inputs_.emplace_back();
    if (i >= wanted.size() || !wanted[i] || !inputs[i].defined()) continue;
    node = MakeNode<InputNode>(i);
    inputs[i] = inputs[i].detach();
    const uint32_t input = node->add_input_metadata(inputs[i]);
    torch::autograd::impl::set_gradient_edge(inputs[i], Edge(node, input));
  }
  Tensors outputs = function(std::move(inputs));
  // It keeps the outputs' histories, and not what they hold.
  source_ = MakeSourceNode(outputs);
  return outputs;
}

Tensors StageRun::ForwardToRecompute(std::function<Tensors(Tensors)> function, Tensors inputs,
                                     std::vector<bool> wanted, std::vector<bool>* has_history) {
  again_ = std::make_unique<Again>();
  again_->before = RandomStates::Of(inputs);
  Tensors outputs = Forward(function, inputs, wanted);
  again_->after = again_->before.Now();
  again_->function = std::move(function);
  again_->inputs = std::move(inputs);
  again_->wanted = std::move(wanted);
  for (at::Tensor& output : outputs) {
    has_history->push_back(output.defined() && output.requires_grad());
    again_->outputs.push_back(InWords(output, has_history->back()));
    if (has_history->back()) output = output.detach();
  }
  source_ = nullptr;
  return outputs;
}

absl::StatusOr<Tensors> StageRun::Recompute() {
  if (again_ == nullptr) return absl::FailedPreconditionError("there was no forward before it");
  const std::unique_ptr<Again> again = std::move(again_);
  Tensors outputs;
  if (again->before == again->after) {
    // It has drawn none. Others may.
    outputs = Forward(again->function, std::move(again->inputs), again->wanted);
  } else {
    const RandomStates now = again->before.Now();
    again->before.Set();
    const auto set_back = absl::MakeCleanup([&] { now.Set(); });
    outputs = Forward(again->function, std::move(again->inputs), again->wanted);
    // Where it draws none now it drew none the first time: another thread did, as a driver does
    // that makes its next batch meanwhile. It may be of the CPU's generator alone that none are
    // drawn.
    if (!again->before.Now().IsOfEither(again->before, again->after)) {
      return absl::FailedPreconditionError(
          "the forward that is recomputed has drawn other random numbers than the first time: "
          "another thread of the process draws from the same generator, or the function is not the "
          "same twice");
    }
  }
  if (outputs.size() != again->outputs.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the forward that is recomputed is not the same twice: it has ",
                     outputs.size(), " outputs, and had ", again->outputs.size()));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool has_history = outputs[i].defined() && outputs[i].requires_grad();
    const std::string now = InWords(outputs[i], has_history);
    if (now == again->outputs[i]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the forward that is recomputed is not the same twice: output ", i, " is ",
                     now, ", and was ", again->outputs[i]));
  }
  return outputs;
}

absl::Status StageRun::CheckGradients(const Tensors& gradients) const {
  if (source_ == nullptr) return absl::FailedPreconditionError("there was no forward before it");
  if (gradients.size() != source_->num_outputs()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there are ", source_->num_outputs(), " outputs, and gradients for ", gradients.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensors> StageRun::Run(Tensors gradients, Leaves leaves, bool retain_graph) {
  bool any = false;
  for (size_t i = 0; i < gradients.size(); ++i) {
    // What has no history has no use for a gradient.
    if (!source_->next_edge(i).is_valid()) gradients[i].reset();
    any = any || gradients[i].defined();
  }
  if (!any) return Tensors(inputs_.size());
  const size_t count = gradients.size();
  const std::unique_ptr<bool[]> reached(new bool[count]);
  for (size_t i = 0; i < count; ++i) reached[i] = gradients[i].defined();
  return Execute(source_, std::move(gradients), absl::MakeConstSpan(reached.get(), count), leaves,
                 retain_graph);
}

absl::StatusOr<Tensors> StageRun::Execute(std::shared_ptr<Node> root, Tensors gradients,
                                          absl::Span<const bool> reached, Leaves leaves,
                                          bool retain_graph) {
  Sink sink(inputs_, leaves, &entries_);
  Execution execution(std::make_shared<const Graph>(absl::MakeConstSpan(&root, 1), Sink::IsStop),
                      {.retain_graph = retain_graph}, &sink);
  execution.Feed(0, std::move(gradients), reached);
  DG_RETURN_IF_ERROR(execution.status());
  return sink.TakeGradients();
}

absl::StatusOr<Tensors> StageRun::Backward(Tensors gradients, ContextRecord& context,
                                           TiedGradients* tied, const LeafCheck& check) {
  DG_RETURN_IF_ERROR(CheckGradients(gradients));
  try {
    absl::StatusOr<Tensors> back =
        Run(std::move(gradients), {&context, tied, &check}, /*retain_graph=*/false);
    source_ = nullptr;
    return back;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

// Cuts off all from which no input can be reached, and returns the nodes that have to run twice.
std::vector<StageRun::Split> StageRun::SplitGraph() {
  // Whether a node leads to an input. Depth first, with a stack of our own: graphs are deep.
  absl::flat_hash_map<Node*, bool> leads;
  std::vector<std::pair<std::shared_ptr<Node>, size_t>> path = {{source_, 0}};
  std::vector<std::shared_ptr<Node>> nodes;  // each behind all that it leads to
  leads[source_.get()] = true;               // it has to run, whatever lies behind it
  while (!path.empty()) {
    auto& [node, next] = path.back();
    if (next < node->num_outputs()) {
      const Edge& edge = node->next_edge(next++);
      if (!edge.is_valid() || !leads.try_emplace(edge.function.get(), false).second) continue;
      path.emplace_back(edge.function, 0);  // invalidates `node` and `next`
      continue;
    }
    bool& leads_on = leads[node.get()];
    leads_on = leads_on || dynamic_cast<InputNode*>(node.get()) != nullptr;
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid() && leads[edge.function.get()]) leads[node.get()] = true;
    }
    nodes.push_back(std::move(node));
    path.pop_back();
  }
  std::vector<Split> splits;
  for (const std::shared_ptr<Node>& node : nodes) {
    if (!leads[node.get()]) continue;
    // libtorch's own operators look at their edges, and compute what is wanted.
    const bool runs_twice = node != source_ && node->is_traceable() && !HasHooks(*node);
    Split split{node, {}};
    for (size_t i = 0; i < node->num_outputs(); ++i) {
      Edge& edge = node->next_edges()[i];
      if (!edge.is_valid() || leads[edge.function.get()]) continue;
      if (runs_twice) {
        split.weights.emplace_back(i, std::exchange(edge, Edge()));
      } else {
        edge = Edge(MakeNode<CaptureNode>(edge), 0);
        // A write to a view wants its edges, but for the first, to be those of what it wraps.
        auto* const write = dynamic_cast<torch::autograd::CopySlices*>(node.get());
        if (write != nullptr && i > 0) write->fn->next_edges().at(i) = edge;
      }
    }
    if (!split.weights.empty()) splits.push_back(std::move(split));
  }
  return splits;
}

absl::StatusOr<Tensors> StageRun::BackwardInput(Tensors gradients) {
  DG_RETURN_IF_ERROR(CheckGradients(gradients));
  try {
    std::vector<Split> splits = SplitGraph();
    for (const Split& split : splits) {
      split.node->add_pre_hook(std::make_unique<CaptureHook>(split.node, &entries_));
    }
    absl::StatusOr<Tensors> back = Run(std::move(gradients), {}, /*retain_graph=*/true);
    for (Split& split : splits) {
      split.node->pre_hooks().clear();
      for (Edge& edge : split.node->next_edges()) edge = Edge();
      for (auto& [place, edge] : split.weights) {
        split.node->next_edges()[place] = std::move(edge);
      }
    }
    // With it goes what no entry leads to.
    source_ = nullptr;
    return back;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::Status StageRun::BackwardWeight(ContextRecord& context, TiedGradients* tied,
                                      const LeafCheck& check) {
  std::vector<Entry> entries = std::exchange(entries_, {});
  if (entries.empty()) return absl::OkStatus();
  try {
    // One root for all of them: so the nodes run, and each leaf's gradients are added up, in the
    // order of a whole backward.
    const std::shared_ptr<Node> root = MakeNode<EntryNode>(entries);
    Tensors gradients;
    for (Entry& entry : entries) gradients.push_back(std::move(entry.gradient));
    entries.clear();
    // The first half may have returned some of them as gradients of inputs, which others read. With
    // a second reference none becomes the gradient of a leaf, to which the next micro-batch adds.
    const Tensors held = gradients;
    // The first half has come to all of them.
    const size_t count = gradients.size();
    const std::unique_ptr<bool[]> reached(new bool[count]);
    std::fill_n(reached.get(), count, true);
    return Execute(root, std::move(gradients), absl::MakeConstSpan(reached.get(), count),
                   {&context, tied, &check}, /*retain_graph=*/false)
        .status();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
