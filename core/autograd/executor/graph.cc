// Walks over a graph of libtorch's once, and numbers its nodes.
#include "core/autograd/executor/graph.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <optional>
#include <typeinfo>
#include <utility>

namespace distgrad {

Graph::Graph(absl::Span<const std::shared_ptr<Node>> roots, absl::FunctionRef<bool(Node&)> is_stop)
    : root_count_(roots.size()) {
  for (const std::shared_ptr<Node>& root : roots) entries_[Add(root, is_stop)].lane = 0;
  // entries_ is its own list of what is left to visit, so each node's successors lie together.
  for (Index i = 0; i < entries_.size(); ++i) {
    entries_[i].first_successor = static_cast<uint32_t>(successors_.size());
    if (entries_[i].kind != Kind::kOperator) continue;
    // Not a reference into entries_, which grows below.
    const Node& node = *entries_[i].node;
    for (const torch::autograd::Edge& edge : node.next_edges()) {
      Successor successor;
      if (edge.is_valid()) {
        successor = {Add(edge.function, is_stop), edge.input_nr};
        ++entries_[successor.node].dependencies;
      }
      successors_.push_back(successor);
    }
    entries_[i].successor_count = static_cast<uint32_t>(node.next_edges().size());
  }
}

Graph::Index Graph::Add(const std::shared_ptr<Node>& node, absl::FunctionRef<bool(Node&)> is_stop) {
  const auto [it, is_new] = index_.try_emplace(node.get(), static_cast<Index>(entries_.size()));
  if (!is_new) return it->second;
  Entry entry;
  entry.node = node;
  Node& function = *node;
  if (is_stop(function)) {
    entry.kind = Kind::kStop;
  } else if (typeid(function) == typeid(torch::autograd::AccumulateGrad)) {
    entry.kind = Kind::kLeaf;
  }
  entry.first_input = static_cast<uint32_t>(input_count_);
  entry.input_count = node->num_inputs();
  input_count_ += entry.input_count;
  entry.lane = LaneOf(*node);
  entries_.push_back(std::move(entry));
  return it->second;
}

uint8_t Graph::LaneOf(Node& node) {
  if (node.device().is_cpu()) return 0;  // asking for a stream is slower
  const std::optional<c10::Stream> stream = node.stream();
  if (!stream.has_value()) return 0;
  const auto lane_of = [this](c10::Stream of_input) {
    const auto it = std::find(devices_.begin(), devices_.end(), of_input.device());
    const size_t index = it - devices_.begin();
    if (it == devices_.end()) {
      devices_.push_back(of_input.device());
      streams_.push_back(of_input);
    }
    if (streams_[index] != of_input) one_stream_per_device_ = false;
    return static_cast<uint8_t>(index + 1);
  };
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& input = node.input_metadata(i);
    if (input.device().type() == stream->device_type()) lane_of(input.stream());
  }
  return lane_of(*stream);
}

Graph::Index Graph::Find(const Node* node) const {
  const auto it = index_.find(node);
  return it == index_.end() ? kNone : it->second;
}

std::vector<bool> Graph::ReachableFrom(absl::Span<const Index> sources) const {
  std::vector<bool> reachable(size(), false);
  std::vector<Index> to_visit;
  const auto visit = [&](Index i) {
    if (reachable[i]) return;
    reachable[i] = true;
    to_visit.push_back(i);
  };
  for (const Index source : sources) visit(source);
  while (!to_visit.empty()) {
    const Index i = to_visit.back();
    to_visit.pop_back();
    for (const Successor& successor : successors(i)) {
      if (successor.node != kNone) visit(successor.node);
    }
  }
  return reachable;
}

}  // namespace distgrad
