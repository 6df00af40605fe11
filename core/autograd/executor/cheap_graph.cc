// Walks over a small graph and gives up at the first node that may be expensive.
#include "core/autograd/executor/cheap_graph.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <typeinfo>
#include <vector>

#include "absl/strings/match.h"
#include "core/autograd/executor/source_node.h"

namespace distgrad {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

constexpr size_t kNodes = 48;
constexpr size_t kEdges = 4 * kNodes;  // one node may have any number
constexpr size_t kBytes = 16 << 10;

// A node that is generated from libtorch's table of derivatives. There is no other way to tell
// one from a function of a user's, which may do whatever it likes.
bool IsOfLibtorch(const Node& node) {
  return absl::StartsWith(typeid(node).name(), "N5torch8autograd9generated");
}

bool HasHooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// Whether nobody but libtorch has a say in what the node does.
bool IsPlain(Node& node) {
  if (HasHooks(node)) return false;
  if (typeid(node) != typeid(AccumulateGrad)) {
    return IsOfLibtorch(node) || typeid(node) == typeid(SourceNode);
  }
  return static_cast<const AccumulateGrad&>(node).tensor_post_acc_grad_hooks() == nullptr;
}

bool IsSmall(const torch::autograd::InputMetadata& input) {
  if (input.is_nested_tensor()) return false;
  size_t bytes = c10::elementSize(c10::typeMetaToScalarType(input.options().dtype()));
  for (const c10::SymInt& size : input.shape_as_dim_vector()) {
    const auto known = size.maybe_as_int();
    if (!known.has_value()) return false;
    bytes *= *known;
  }
  return bytes <= kBytes;
}

bool IsCheapNode(Node& node, bool is_stop) {
  if (is_stop ? HasHooks(node) : !IsPlain(node)) return false;
  // Whoever feeds it knows the size of what he feeds.
  if (typeid(node) == typeid(SourceNode)) return true;
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& input = node.input_metadata(i);
    if (!input.device().is_cpu() || !IsSmall(input)) return false;
  }
  return true;
}

}  // namespace

bool MayTakeLong(Node& node, bool is_stop) {
  if (is_stop) return HasHooks(node);
  if (!IsPlain(node)) return true;
  const auto keeps_thread = [](const torch::autograd::InputMetadata& input) {
    return input.device().is_cpu() && !IsSmall(input);
  };
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    if (keeps_thread(node.input_metadata(i))) return true;
  }
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (edge.is_valid() && keeps_thread(edge.function->input_metadata(edge.input_nr))) return true;
  }
  return false;
}

bool CheapToRunInline(absl::Span<const std::shared_ptr<Node>> roots,
                      absl::FunctionRef<bool(Node&)> is_stop) {
  if (torch::autograd::AnomalyMode::is_enabled()) return false;
  std::vector<Node*> nodes;
  const auto visit = [&nodes](Node* node) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  };
  for (const auto& root : roots) visit(root.get());
  size_t edges = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes.size() > kNodes) return false;
    const bool stop = is_stop(*nodes[i]);
    if (!IsCheapNode(*nodes[i], stop)) return false;
    if (stop) continue;
    edges += nodes[i]->next_edges().size();
    if (edges > kEdges) return false;
    for (const torch::autograd::Edge& edge : nodes[i]->next_edges()) {
      if (edge.is_valid()) visit(edge.function.get());
    }
  }
  return true;
}

}  // namespace distgrad
