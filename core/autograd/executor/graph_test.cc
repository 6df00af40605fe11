// How graphs are laid out: the numbers of their nodes, counts of edges, stops, and reachability.
#include "core/autograd/executor/graph.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/split.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

#include "core/autograd/executor/executor_testing.h"
#include "core/autograd/executor/source_node.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using at::Tensor;
using torch::autograd::impl::grad_accumulator;

Tensor Leaf() { return at::ones({2}).requires_grad_(); }

TEST(SourceNode, UndefinedAndConstantTensorsKeepTheirPlace) {
  const Tensor leaf = Leaf();
  const Tensor product = leaf * 2;
  const SourceNode source({Tensor(), at::ones({2}), leaf, product});
  EXPECT_EQ(source.num_inputs(), 4u);
  ASSERT_EQ(source.num_outputs(), 4u);
  EXPECT_FALSE(source.next_edge(0).is_valid());
  EXPECT_FALSE(source.next_edge(1).is_valid());
  EXPECT_EQ(source.next_edge(2).function, grad_accumulator(leaf));
  EXPECT_EQ(source.next_edge(3).function, product.grad_fn());
}

TEST(SourceNode, PointsToTheInputThatMadeTheTensor) {
  const std::vector<Tensor> parts = at::split(Leaf() * 2, 1);
  const SourceNode source({parts[1]});
  EXPECT_EQ(source.next_edge(0).input_nr, 1u);
}

TEST(Graph, NumbersRootsFirstAndCountsEdges) {
  const Tensor a = Leaf(), b = Leaf();
  const Tensor product = a * b;
  const Tensor sum = product + product;
  const auto graph = GraphOf({{sum}, {product, b}});
  EXPECT_EQ(graph->size(), 6u);  // two sources, sum, product, a, b
  EXPECT_EQ(graph->root_count(), 2u);
  EXPECT_EQ(graph->entry(0).dependencies, 0u);
  EXPECT_EQ(graph->entry(1).dependencies, 0u);
  EXPECT_EQ(graph->entry(1).input_count, 2u);
  const Graph::Index product_index = graph->Find(product.grad_fn().get());
  EXPECT_EQ(graph->entry(product_index).dependencies, 3u);
  EXPECT_EQ(graph->entry(product_index).kind, Graph::Kind::kOperator);
  const Graph::Index b_index = graph->Find(grad_accumulator(b).get());
  EXPECT_EQ(graph->entry(b_index).dependencies, 2u);
  EXPECT_EQ(graph->entry(b_index).kind, Graph::Kind::kLeaf);
  ASSERT_EQ(graph->successors(product_index).size(), 2u);
  EXPECT_EQ(graph->successors(product_index)[1].node, b_index);
  EXPECT_TRUE(graph->successors(b_index).empty());
  EXPECT_EQ(graph->Find(nullptr), Graph::kNone);
}

TEST(Graph, AnInputThatNeedsNoGradientHasNoSuccessor) {
  const Tensor a = Leaf();
  const Tensor product = a * at::ones({2});
  const auto graph = GraphOf({{product}});
  const auto successors = graph->successors(graph->Find(product.grad_fn().get()));
  ASSERT_EQ(successors.size(), 2u);
  EXPECT_NE(successors[0].node, Graph::kNone);
  EXPECT_EQ(successors[1].node, Graph::kNone);
}

TEST(Graph, EndsAtStopNodes) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor behind = Leaf() * 2;
  stop->add_next_edge(torch::autograd::impl::gradient_edge(behind));
  const Tensor received = at::ones({2});
  StopNode::MakeHistory(stop, received);
  const auto graph = GraphOf({{received * 3}});
  const Graph::Index stop_index = graph->Find(stop.get());
  ASSERT_NE(stop_index, Graph::kNone);
  EXPECT_EQ(graph->entry(stop_index).kind, Graph::Kind::kStop);
  EXPECT_TRUE(graph->successors(stop_index).empty());
  EXPECT_EQ(graph->Find(behind.grad_fn().get()), Graph::kNone);
}

TEST(Graph, ReachableFrom) {
  const Tensor a = Leaf(), b = Leaf();
  const Tensor one = a * 2, both = one + b;
  const auto graph = GraphOf({{one}, {both}});
  const std::vector<bool> from_one = graph->ReachableFrom({0});
  EXPECT_TRUE(from_one[0]);
  EXPECT_FALSE(from_one[1]);
  EXPECT_TRUE(from_one[graph->Find(grad_accumulator(a).get())]);
  EXPECT_FALSE(from_one[graph->Find(grad_accumulator(b).get())]);
  EXPECT_FALSE(from_one[graph->Find(both.grad_fn().get())]);
  const std::vector<bool> from_both = graph->ReachableFrom({1, 0});
  EXPECT_EQ(from_both, std::vector<bool>(graph->size(), true));
  EXPECT_EQ(graph->ReachableFrom({}), std::vector<bool>(graph->size(), false));
}

TEST(Graph, NoRoots) { EXPECT_EQ(GraphOf({})->size(), 0u); }

}  // namespace
}  // namespace distgrad
