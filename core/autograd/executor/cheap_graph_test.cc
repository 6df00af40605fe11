// Graphs that are cheap enough to run inline, and what keeps others from it.
#include "core/autograd/executor/cheap_graph.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "core/autograd/executor/source_node.h"

namespace distgrad {
namespace {

using torch::autograd::Node;

bool Cheap(const at::Tensor& result) {
  return CheapToRunInline({MakeSourceNode({result})}, [](Node&) { return false; });
}

at::Tensor Leaf(at::IntArrayRef shape) { return at::ones(shape).requires_grad_(); }

TEST(CheapGraphTest, AFewSmallOperatorsAre) { EXPECT_TRUE(Cheap((Leaf({8, 8}) * 2 + 1).sum())); }

TEST(CheapGraphTest, LargeTensorsAreNot) {
  EXPECT_TRUE(Cheap(Leaf({4096}) * 2));
  EXPECT_FALSE(Cheap(Leaf({4097}) * 2));
  // Also where only what lies behind a small result is large.
  EXPECT_FALSE(Cheap((Leaf({100, 100}) * 2).sum()));
  EXPECT_FALSE(Cheap(Leaf({100, 100}).sum()));
}

TEST(CheapGraphTest, ManyNodesAreNot) {
  at::Tensor x = Leaf({1});
  for (int i = 0; i < 100; ++i) x = x * 2;
  EXPECT_FALSE(Cheap(x));
}

// A peer may have asked for the node.
TEST(CheapGraphTest, ANodeOfManyEdgesIsNot) {
  const at::Tensor leaf = Leaf({1});
  EXPECT_TRUE(Cheap(at::cat(std::vector<at::Tensor>(100, leaf))));
  EXPECT_FALSE(Cheap(at::cat(std::vector<at::Tensor>(1000, leaf))));
}

TEST(CheapGraphTest, TheSameNodeByManyWaysIsOne) {
  const at::Tensor x = Leaf({1}) * 2;
  at::Tensor sum = x + x;
  for (int i = 0; i < 10; ++i) sum = sum + x * x;
  EXPECT_TRUE(Cheap(sum));
}

TEST(CheapGraphTest, NothingWithAHookIs) {
  const at::Tensor leaf = Leaf({1});
  const at::Tensor middle = leaf * 2;
  const at::Tensor result = middle + 1;
  ASSERT_TRUE(Cheap(result));
  middle.register_hook([](const at::Tensor& gradient) { return gradient; });
  EXPECT_FALSE(Cheap(result));

  const at::Tensor other = Leaf({1});
  const at::Tensor of_other = other * 2;
  ASSERT_TRUE(Cheap(of_other));
  other.register_hook([](const at::Tensor& gradient) { return gradient; });
  EXPECT_FALSE(Cheap(of_other));

  const at::Tensor retained = Leaf({1}) * 2;
  retained.retain_grad();
  EXPECT_FALSE(Cheap(retained + 1));
}

struct Double : torch::autograd::Function<Double> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2};
  }
};

TEST(CheapGraphTest, AFunctionOfTheUsersIsNot) { EXPECT_FALSE(Cheap(Double::apply(Leaf({1})))); }

TEST(CheapGraphTest, WhatLiesBehindAStopDoesNotCount) {
  const at::Tensor middle = Leaf({1000, 1000}).sum();
  const at::Tensor result = middle * 2;
  EXPECT_FALSE(Cheap(result));
  const Node* const stop = middle.grad_fn().get();
  EXPECT_TRUE(
      CheapToRunInline({MakeSourceNode({result})}, [stop](Node& node) { return &node == stop; }));
}

TEST(CheapGraphTest, WhatComesToAStopDoes) {
  const at::Tensor large = Leaf({100, 100}) * 2;
  const Node* const stop = large.grad_fn().get();
  EXPECT_FALSE(CheapToRunInline({MakeSourceNode({large.sum()})},
                                [stop](Node& node) { return &node == stop; }));
}

TEST(CheapGraphTest, WhatMayTakeLong) {
  const auto may_take_long = [](const at::Tensor& result) {
    return MayTakeLong(*result.grad_fn(), /*is_stop=*/false);
  };
  EXPECT_FALSE(may_take_long(Leaf({64, 64}) * 2));
  EXPECT_TRUE(may_take_long(Leaf({100, 100}) * 2)) << "what it takes is large";
  EXPECT_TRUE(may_take_long(Leaf({100, 100}).sum())) << "what it gives is large";
  EXPECT_TRUE(may_take_long(Double::apply(Leaf({1})))) << "a function of the user's";
  const at::Tensor hooked = Leaf({1}) * 2;
  hooked.register_hook([](const at::Tensor& gradient) { return gradient; });
  EXPECT_TRUE(may_take_long(hooked));
  EXPECT_FALSE(may_take_long(hooked * 2)) << "the hook is another node's";
  EXPECT_TRUE(MayTakeLong(*hooked.grad_fn(), /*is_stop=*/true));
  EXPECT_FALSE(MayTakeLong(*(Leaf({100, 100}) * 2).grad_fn(), /*is_stop=*/true));
}

}  // namespace
}  // namespace distgrad
