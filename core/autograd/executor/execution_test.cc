// Runs of a graph: which nodes run and when, what leaves, stop nodes and hooks get, and cancelling.
#include "core/autograd/executor/execution.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "core/autograd/executor/executor_testing.h"
#include "core/autograd/executor/graph.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor Leaf(double value = 1) { return at::full({2}, value, at::kDouble).requires_grad_(); }
Tensor Full(double value) { return at::full({2}, value, at::kDouble); }

ExecutionOptions Retain() {
  ExecutionOptions options;
  options.retain_graph = true;
  return options;
}

// Runs what leads from `root`, fed with ones, and which ends in one burst.
absl::Status StatusOf(const Tensor& root, RecordingSink* sink) {
  Execution execution(GraphOf({{root}}), ExecutionOptions(), sink);
  execution.Feed(0, {at::ones_like(root)}, {true});
  EXPECT_EQ(sink->idle, 1);
  EXPECT_TRUE(execution.idle());
  return execution.status();
}

// ---- what runs ----

TEST(Execution, GivesLeavesTheirSums) {
  const Tensor a = Leaf(3), b = Leaf(4);
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(a * b + a, &sink).ok());
  EXPECT_TRUE(sink.Of(a).equal(Full(5)));
  EXPECT_TRUE(sink.Of(b).equal(Full(3)));
  EXPECT_FALSE(a.grad().defined());
}

TEST(Execution, WhatIsNotReachedDoesNotRun) {
  int ran = 0, hooked = 0;
  Spy::Body count = [&](const variable_list&) { ++ran; };
  const Tensor used = Leaf(), unused = Leaf();
  const Tensor through = Watch(unused, &count);
  through.register_hook([&](Tensor) { ++hooked; });
  unused.register_hook([&](Tensor) { ++hooked; });
  RecordingSink sink;
  Execution execution(GraphOf({{used * 2}, {through}}), ExecutionOptions(), &sink);
  execution.Feed(1, {Tensor()}, {false});
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(hooked, 0);
  EXPECT_EQ(sink.leaves.size(), 1u);
  EXPECT_TRUE(sink.Of(used).equal(Full(2)));
  EXPECT_EQ(sink.idle, 2);
}

TEST(Execution, ReachedWithUndefinedRunsAndMaterializesZeros) {
  variable_list seen;
  Spy::Body note = [&](const variable_list& gradients) { seen = gradients; };
  const Tensor leaf = Leaf();
  const variable_list outputs = Spy::apply(leaf, &note, true);
  RecordingSink sink;
  Execution execution(GraphOf({{outputs[0], outputs[1]}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Tensor(), Full(5)}, {true, true});
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(Full(0)));
  EXPECT_TRUE(seen[1].equal(Full(5)));
  EXPECT_TRUE(sink.Of(leaf).equal(Full(0)));
}

TEST(Execution, AnInputOfARootThatIsNotReachedLeadsNowhere) {
  int ran = 0;
  Spy::Body count = [&](const variable_list&) { ++ran; };
  const Tensor used = Leaf(), unused = Leaf(), undefined = Leaf();
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1);
  StopNode::MakeHistory(stop, received);
  RecordingSink sink;
  Execution execution(
      GraphOf({{used * 2, Watch(unused, &count), Watch(undefined, &count), received * 2}}),
      ExecutionOptions(), &sink);
  // What is fed to an input that is not reached goes nowhere either.
  execution.Feed(0, {Full(1), Full(1), Tensor(), Tensor()}, {true, false, true, false});
  EXPECT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(sink.Of(used).equal(Full(2)));
  EXPECT_FALSE(sink.Of(unused).defined());
  EXPECT_TRUE(sink.Of(undefined).equal(Full(0)));
  ASSERT_EQ(sink.stops[stop.get()].size(), 1u);
  EXPECT_FALSE(sink.stops[stop.get()][0].reached);
}

TEST(Execution, UndefinedAtALeafIsNotGivenToTheSink) {
  int ran = 0;
  Spy::Body count = [&](const variable_list& gradients) {
    ++ran;
    EXPECT_FALSE(gradients[0].defined());
  };
  const Tensor leaf = Leaf();
  RecordingSink sink;
  Execution execution(GraphOf({{Spy::apply(leaf, &count, false)[1]}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(execution.status().ok());
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(Execution, ANodeWithOneReachedInputRunsOnceAllHaveArrived) {
  const Tensor leaf = Leaf(), trunk = leaf * 3;
  RecordingSink sink;
  Execution execution(GraphOf({{trunk * 2}, {trunk * 5}, {trunk * 7}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  execution.Feed(2, {Full(1)}, {true});
  EXPECT_TRUE(sink.leaves.empty());
  execution.Feed(1, {Tensor()}, {false});
  EXPECT_TRUE(sink.Of(leaf).equal(Full(27)));
  EXPECT_EQ(sink.idle, 3);
}

TEST(Execution, AFrozenLeafGetsNothing) {
  const Tensor frozen = Leaf(), other = Leaf();
  const Tensor root = frozen * other;
  frozen.set_requires_grad(false);
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(root, &sink).ok());
  EXPECT_EQ(sink.leaves.size(), 1u);
}

// ---- stop nodes ----

TEST(Execution, StopNodesGetTheirGradientsAfterTensorHooks) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor first = Full(1), second = Full(1), third = Full(1);
  for (const Tensor& tensor : {first, second, third}) StopNode::MakeHistory(stop, tensor);
  first.register_hook([](const Tensor& gradient) { return gradient * 10; });
  first.retain_grad();
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(first * 2 + third * 4, &sink).ok());
  ASSERT_EQ(sink.stops[stop.get()].size(), 1u);
  const RecordingSink::Stop& got = sink.stops[stop.get()][0];
  EXPECT_TRUE(got.reached);
  ASSERT_EQ(got.gradients.size(), 3u);
  EXPECT_TRUE(got.gradients[0].equal(Full(20)));
  EXPECT_FALSE(got.gradients[1].defined());
  EXPECT_TRUE(got.gradients[2].equal(Full(4)));
  EXPECT_TRUE(first.grad().equal(Full(20)));
}

TEST(Execution, StopNodesHaveHooksLikeAFunctionThatHandsOn) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor first = Full(1), second = Full(1);
  for (const Tensor& tensor : {first, second}) StopNode::MakeHistory(stop, tensor);
  std::string order;
  first.register_hook([&](const Tensor& gradient) {
    order += "tensor ";
    return gradient * 3;
  });
  stop->add_pre_hook(std::make_unique<PreHook>([&](variable_list gradients) {
    order += "before ";
    return variable_list{gradients[0] * 5, gradients[1]};
  }));
  stop->add_post_hook(std::make_unique<PostHook>([&](variable_list gradients) {
    order += "after";
    return variable_list{gradients[0], gradients[1] * 7};
  }));
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(first * 2 + second, &sink).ok());
  EXPECT_EQ(order, "tensor before after");
  ASSERT_EQ(sink.stops[stop.get()].size(), 1u);
  EXPECT_TRUE(sink.stops[stop.get()][0].gradients[0].equal(Full(30)));
  EXPECT_TRUE(sink.stops[stop.get()][0].gradients[1].equal(Full(7)));
}

TEST(Execution, AHookOfAStopNodeMayNotChangeHowManyGradientsThereAre) {
  for (const bool before : {true, false}) {
    const auto stop = std::make_shared<StopNode>();
    const Tensor received = Full(1);
    StopNode::MakeHistory(stop, received);
    const PreHook::Body drop = [](variable_list) { return variable_list(); };
    if (before) {
      stop->add_pre_hook(std::make_unique<PreHook>(drop));
    } else {
      stop->add_post_hook(std::make_unique<PostHook>(drop));
    }
    RecordingSink sink;
    const absl::Status status = StatusOf(received * 2, &sink);
    EXPECT_TRUE(absl::StrContains(status.message(), "changed the number of gradients")) << status;
    EXPECT_TRUE(sink.stops.empty());
  }
}

TEST(Execution, StopNodesThatAreNotReachedAreToldSoWithoutHooks) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1);
  StopNode::MakeHistory(stop, received);
  stop->add_pre_hook(std::make_unique<PreHook>([](variable_list gradients) {
    ADD_FAILURE();
    return gradients;
  }));
  received.register_hook([](const Tensor&) { ADD_FAILURE(); });
  RecordingSink sink;
  Execution execution(GraphOf({{received * 2}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Tensor()}, {false});
  ASSERT_EQ(sink.stops[stop.get()].size(), 1u);
  EXPECT_FALSE(sink.stops[stop.get()][0].reached);
  ASSERT_EQ(sink.stops[stop.get()][0].gradients.size(), 1u);
  EXPECT_FALSE(sink.stops[stop.get()][0].gradients[0].defined());
}

// ---- leaves and their hooks ----

TEST(Execution, PostAccumulateHooksSeeTheGradientInTheLeaf) {
  const Tensor leaf = Leaf(1), own = Full(7);
  leaf.mutable_grad() = own;
  Tensor seen;
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<PostAccumulateHook>([&](const Tensor& tensor) {
        seen = tensor.grad();
        EXPECT_TRUE(tensor.is_same(leaf));
        leaf.data().sub_(leaf.grad());  // a step of an optimizer
        tensor.mutable_grad().mul_(10);
      }));
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(leaf * 3, &sink).ok());
  EXPECT_TRUE(leaf.grad().is_same(own)) << "what was there before is put back";
  EXPECT_TRUE(own.equal(Full(7)));
  EXPECT_TRUE(leaf.detach().equal(Full(-2)));
  EXPECT_TRUE(sink.Of(leaf).equal(Full(30)));
  EXPECT_TRUE(seen.is_alias_of(sink.Of(leaf)));
}

TEST(Execution, APostAccumulateHookMayDropTheGradient) {
  const Tensor leaf = Leaf();
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<PostAccumulateHook>(
                [](const Tensor& tensor) { tensor.mutable_grad() = Tensor(); }));
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(leaf * 3, &sink).ok());
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(Execution, APostAccumulateHookThatThrowsLeavesTheLeafAsItWas) {
  const Tensor leaf = Leaf(), own = Full(7);
  leaf.mutable_grad() = own;
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<PostAccumulateHook>(
                [](const Tensor&) { throw std::runtime_error("hook says no"); }));
  RecordingSink sink;
  EXPECT_FALSE(StatusOf(leaf * 3, &sink).ok());
  EXPECT_TRUE(leaf.grad().is_same(own));
}

TEST(Execution, TheSinkOwnsWhatLeavesGet) {
  const Tensor a = Leaf(), b = Leaf();
  const Tensor expanded = at::ones({3, 1}, at::kDouble).requires_grad_();
  const Tensor fed = Full(1);
  RecordingSink sink;
  Execution execution(GraphOf({{a + b, expanded.sum()}}), ExecutionOptions(), &sink);
  execution.Feed(0, {fed, at::ones({}, at::kDouble)}, {true, true});
  EXPECT_TRUE(sink.Of(a).equal(fed));
  EXPECT_FALSE(sink.Of(a).is_alias_of(sink.Of(b)));
  EXPECT_FALSE(sink.Of(a).is_alias_of(fed));
  EXPECT_EQ(sink.Of(expanded).strides(), expanded.strides());
}

// ---- saved variables ----

TEST(Execution, ReleasesWhatNodesSavedUnlessRetained) {
  for (const bool retain : {false, true}) {
    const Tensor leaf = Leaf();
    Tensor root;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> saved;
    {
      const Tensor factor = Full(2);
      root = leaf * factor;
      saved.emplace(factor.storage().getWeakStorageImpl());
    }
    RecordingSink sink;
    Execution execution(GraphOf({{root}}), retain ? Retain() : ExecutionOptions(), &sink);
    EXPECT_FALSE(saved->expired());
    execution.Feed(0, {Full(1)}, {true});
    EXPECT_EQ(saved->expired(), !retain);
  }
}

TEST(Execution, OneGraphServesManyExecutions) {
  const Tensor leaf = Leaf(3);
  const auto graph = GraphOf({{leaf * leaf}});
  for (const bool last : {false, false, true}) {
    RecordingSink sink;
    Execution execution(graph, last ? ExecutionOptions() : Retain(), &sink);
    execution.Feed(0, {Full(1)}, {true});
    EXPECT_TRUE(sink.Of(leaf).equal(Full(6)));
  }
  RecordingSink sink;
  Execution execution(graph, ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "MulBackward0"))
      << execution.status();
  EXPECT_TRUE(
      absl::StrContains(execution.status().message(), "backward through the graph a second time"))
      << execution.status();
}

// ---- cancel, idle ----

TEST(Execution, CancelInTheMiddleStopsBeforeTheNextNode) {
  RecordingSink sink;
  std::unique_ptr<Execution> execution;
  Spy::Body cancel = [&](const variable_list&) {
    execution->Cancel(absl::DeadlineExceededError("too late"));
    EXPECT_FALSE(execution->idle());
  };
  Spy::Body never = [](const variable_list&) { ADD_FAILURE(); };
  const Tensor root = Watch(Watch(Leaf(), &never), &cancel);
  execution = std::make_unique<Execution>(GraphOf({{root}}), ExecutionOptions(), &sink);
  execution->Feed(0, {Full(1)}, {true});
  EXPECT_EQ(execution->status(), absl::DeadlineExceededError("too late"));
  EXPECT_EQ(sink.idle, 1);
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(Execution, CancelBeforeTheFirstFeed) {
  RecordingSink sink;
  Execution execution(GraphOf({{Leaf() * 2}}), ExecutionOptions(), &sink);
  execution.Cancel(absl::CancelledError("no"));
  EXPECT_EQ(sink.idle, 0);
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(sink.leaves.empty());
  EXPECT_EQ(sink.idle, 1);
}

TEST(Execution, OnIdleMayFeedMore) {
  const Tensor a = Leaf(), b = Leaf();
  RecordingSink sink;
  Execution execution(GraphOf({{a * 2}, {b * 2}}), ExecutionOptions(), &sink);
  sink.on_idle = [&] {
    EXPECT_TRUE(execution.idle());
    if (sink.idle == 1) execution.Feed(1, {Full(1)}, {true});
  };
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_EQ(sink.leaves.size(), 2u);
  EXPECT_EQ(sink.idle, 2);
}

TEST(Execution, OnIdleMayDestroyTheExecution) {
  RecordingSink sink;
  auto execution = std::make_unique<Execution>(GraphOf({{Leaf() * 2}}), ExecutionOptions(), &sink);
  sink.on_idle = [&] { execution.reset(); };
  Execution* const raw = execution.get();
  raw->Feed(0, {Full(1)}, {true});
  EXPECT_EQ(execution, nullptr);
}

TEST(Execution, TheSinkMayFeedAnotherRootMeanwhile) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1), leaf = Leaf();
  StopNode::MakeHistory(stop, received);
  RecordingSink sink;
  Execution execution(GraphOf({{received * 2}, {leaf * 2}}), ExecutionOptions(), &sink);
  sink.on_stop = [&] { execution.Feed(1, {Full(1)}, {true}); };
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(sink.Of(leaf).equal(Full(2)));
  EXPECT_EQ(sink.idle, 1);
}

// The sink hears of each node that runs before it does; of those that are not reached, nothing.
TEST(Execution, SaysWhatRunsNext) {
  struct Sink : RecordingSink {
    void OnNext(torch::autograd::Node* next) override {
      names.push_back(next == nullptr ? "nothing" : next->name());
    }
    std::vector<std::string> names;
  };
  const Tensor leaf = at::ones({2}).requires_grad_(), other = at::ones({2}).requires_grad_();
  const auto stop = std::make_shared<StopNode>();
  Tensor received = at::ones({2});
  StopNode::MakeHistory(stop, received);
  Sink sink;
  Execution execution(GraphOf({{leaf.sin() * received}, {other.cos()}}), ExecutionOptions(), &sink);
  execution.Feed(1, {Tensor()}, {false});
  EXPECT_TRUE(sink.names.empty());
  execution.Feed(0, {at::ones({2})}, {true});
  ASSERT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_EQ(sink.names, (std::vector<std::string>{"MulBackward0", "StopNode", "SinBackward0",
                                                  "torch::autograd::AccumulateGrad"}));
}

// torch::autograd::grad() would have nodes on its thread leave out what it has no use for, and a
// thread inside any node holds a mutex that another one might wait for.
TEST(Execution, NodesDoNotRunInsideTorchsNodes) {
  const Tensor leaf = at::ones({2}).requires_grad_(), other = at::ones({2}).requires_grad_();
  EXPECT_TRUE(MayRunNodesHere());
  absl::Status status;
  Spy::Body body = [&](const torch::autograd::variable_list&) {
    EXPECT_FALSE(MayRunNodesHere());
    RecordingSink sink;
    Execution execution(GraphOf({{leaf.sin()}}), ExecutionOptions(), &sink);
    execution.Feed(0, {at::ones({2})}, {true});
    EXPECT_EQ(sink.idle, 1);
    EXPECT_TRUE(sink.leaves.empty());
    status = execution.status();
  };
  torch::autograd::grad({Watch(other, &body).sum()}, {other});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  Spy::Body everything = [&](const torch::autograd::variable_list&) {
    EXPECT_FALSE(MayRunNodesHere());
  };
  torch::autograd::backward({Watch(other, &everything).sum()});
  EXPECT_TRUE(MayRunNodesHere());
}

}  // namespace
}  // namespace distgrad
