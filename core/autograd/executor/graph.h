// A local autograd graph, laid out for execution: its nodes numbered, its edges resolved to
// those numbers, and for each node the count of edges that come into it.
//
// Built from the roots that will be fed, once, and then only read; so one Graph can serve many
// executions (passes with retain_graph).
#ifndef DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRAPH_H_
#define DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRAPH_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace distgrad {

// Immutable after construction.
class Graph {
 public:
  using Node = torch::autograd::Node;
  using Index = uint32_t;
  static constexpr Index kNone = ~Index{0};

  enum class Kind : uint8_t {
    kOperator,  // runs
    kLeaf,      // an AccumulateGrad: its gradient goes to the sink
    kStop,      // whatever `is_stop` said: what arrives goes to the sink; not traversed
  };

  struct Successor {
    Index node = kNone;  // kNone: no gradient is wanted
    uint32_t input = 0;  // which of its inputs
  };

  struct Entry {
    std::shared_ptr<Node> node;
    Kind kind = Kind::kOperator;
    uint32_t dependencies = 0;  // edges that come into it; 0 for roots alone
    uint32_t first_successor = 0;
    uint32_t successor_count = 0;
    uint32_t first_input = 0;  // the inputs of all nodes are numbered through
    uint32_t input_count = 0;
    uint8_t lane = 0;  // 0: of the CPU, like all roots; n: of devices()[n - 1]
  };

  // Traverses what can be reached from `roots`, which are distinct and have no edges into them
  // (SourceNodes). Iterative: depth does not matter. The roots have the first indices, in their
  // order.
  Graph(absl::Span<const std::shared_ptr<Node>> roots, absl::FunctionRef<bool(Node&)> is_stop);

  size_t size() const { return entries_.size(); }
  size_t root_count() const { return root_count_; }
  size_t input_count() const { return input_count_; }
  // The accelerators that nodes run on.
  absl::Span<const c10::Device> devices() const { return devices_; }
  // Whether all nodes of one device run on one stream. If not, a gradient that one node is done
  // with may still be being read on another stream, so nothing may be written over it.
  bool one_stream_per_device() const { return one_stream_per_device_; }
  const Entry& entry(Index i) const { return entries_[i]; }
  absl::Span<const Successor> successors(Index i) const {
    return absl::MakeConstSpan(successors_)
        .subspan(entries_[i].first_successor, entries_[i].successor_count);
  }

  // Returns kNone if the node is not part of this graph.
  Index Find(const Node* node) const;

  // Whether each node (by index) can be reached from `sources`, themselves included.
  std::vector<bool> ReachableFrom(absl::Span<const Index> sources) const;

 private:
  Index Add(const std::shared_ptr<Node>& node, absl::FunctionRef<bool(Node&)> is_stop);
  uint8_t LaneOf(Node& node);

  std::vector<Entry> entries_;
  std::vector<Successor> successors_;
  std::vector<c10::Device> devices_;
  std::vector<c10::Stream> streams_;  // the first one seen, by device
  bool one_stream_per_device_ = true;
  absl::flat_hash_map<const Node*, Index> index_;
  size_t root_count_;
  size_t input_count_ = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_AUTOGRAD_EXECUTOR_GRAPH_H_
