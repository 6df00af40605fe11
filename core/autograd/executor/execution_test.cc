#include "core/autograd/executor/execution.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
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
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Tensor Leaf(double value = 1) { return at::full({2}, value, at::kDouble).requires_grad_(); }
Tensor Full(double value) { return at::full({2}, value, at::kDouble); }

// Calls a function of the test's in backward, with what arrived.
struct Spy : torch::autograd::Function<Spy> {
  using Body = std::function<void(const variable_list&)>;

  static variable_list forward(AutogradContext* context, const Variable& a, Body* body,
                               bool materialize) {
    context->set_materialize_grads(materialize);
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return {a.clone(), a * 2};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    (*reinterpret_cast<Body*>(context->saved_data["body"].toInt()))(gradients);
    return {gradients[0], Variable(), Variable()};
  }
};

struct WrongShape : torch::autograd::Function<WrongShape> {
  static Variable forward(AutogradContext*, const Variable& a) { return a.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    return {at::ones({7}, at::kDouble)};
  }
};

struct PreHook : torch::autograd::FunctionPreHook {
  explicit PreHook(std::function<variable_list(variable_list)> b) : body(std::move(b)) {}
  variable_list operator()(const variable_list& gradients) override { return body(gradients); }
  const std::function<variable_list(variable_list)> body;
};

struct PostHook : torch::autograd::FunctionPostHook {
  explicit PostHook(std::function<variable_list(variable_list)> b) : body(std::move(b)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    return body(outputs);
  }
  const std::function<variable_list(variable_list)> body;
};

struct PostAccumulateHook : torch::autograd::PostAccumulateGradHook {
  explicit PostAccumulateHook(std::function<void(const Tensor&)> b) : body(std::move(b)) {}
  void operator()(const Variable& tensor) override { body(tensor); }
  const std::function<void(const Tensor&)> body;
};

ExecutionOptions Retain() {
  ExecutionOptions options;
  options.retain_graph = true;
  return options;
}

// Runs what leads from `root`, fed with ones, and expects an error of one node.
absl::Status StatusOf(const Tensor& root, RecordingSink* sink) {
  Execution execution(GraphOf({{root}}), ExecutionOptions(), sink);
  execution.Feed(0, {at::ones_like(root)}, true);
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
  const Tensor through = Spy::apply(unused, &count, true)[0];
  through.register_hook([&](Tensor) { ++hooked; });
  unused.register_hook([&](Tensor) { ++hooked; });
  RecordingSink sink;
  Execution execution(GraphOf({{used * 2}, {through}}), ExecutionOptions(), &sink);
  execution.Feed(1, {Tensor()}, false);
  execution.Feed(0, {Full(1)}, true);
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
  execution.Feed(0, {Tensor(), Full(5)}, true);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(Full(0)));
  EXPECT_TRUE(seen[1].equal(Full(5)));
  EXPECT_TRUE(sink.Of(leaf).equal(Full(0)));
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
  execution.Feed(0, {Full(1)}, true);
  EXPECT_TRUE(execution.status().ok());
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(Execution, ANodeWithOneReachedInputRunsOnceAllHaveArrived) {
  const Tensor leaf = Leaf(), trunk = leaf * 3;
  RecordingSink sink;
  Execution execution(GraphOf({{trunk * 2}, {trunk * 5}, {trunk * 7}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, true);
  execution.Feed(2, {Full(1)}, true);
  EXPECT_TRUE(sink.leaves.empty());
  execution.Feed(1, {Tensor()}, false);
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

TEST(Execution, StopNodesThatAreNotReachedAreToldSoWithoutHooks) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1);
  StopNode::MakeHistory(stop, received);
  received.register_hook([](const Tensor&) { ADD_FAILURE(); });
  RecordingSink sink;
  Execution execution(GraphOf({{received * 2}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Tensor()}, false);
  ASSERT_EQ(sink.stops[stop.get()].size(), 1u);
  EXPECT_FALSE(sink.stops[stop.get()][0].reached);
  ASSERT_EQ(sink.stops[stop.get()][0].gradients.size(), 1u);
  EXPECT_FALSE(sink.stops[stop.get()][0].gradients[0].defined());
}

// ---- leaves and their hooks ----

TEST(Execution, PostAccumulateHooksSeeAStandInForTheLeaf) {
  const Tensor leaf = Leaf(1);
  Tensor seen;
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<PostAccumulateHook>([&](const Tensor& tensor) {
        seen = tensor.grad();
        EXPECT_TRUE(tensor.is_leaf() && tensor.requires_grad());
        tensor.data().sub_(tensor.grad());  // a step of an optimizer
        tensor.mutable_grad().mul_(10);
      }));
  RecordingSink sink;
  EXPECT_TRUE(StatusOf(leaf * 3, &sink).ok());
  EXPECT_FALSE(leaf.grad().defined());
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

TEST(Execution, TheSinkOwnsWhatLeavesGet) {
  const Tensor a = Leaf(), b = Leaf();
  const Tensor expanded = at::ones({3, 1}, at::kDouble).requires_grad_();
  const Tensor fed = Full(1);
  RecordingSink sink;
  Execution execution(GraphOf({{a + b, expanded.sum()}}), ExecutionOptions(), &sink);
  execution.Feed(0, {fed, at::ones({}, at::kDouble)}, true);
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
    execution.Feed(0, {Full(1)}, true);
    EXPECT_EQ(saved->expired(), !retain);
  }
}

TEST(Execution, OneGraphServesManyExecutions) {
  const Tensor leaf = Leaf(3);
  const auto graph = GraphOf({{leaf * leaf}});
  for (const bool last : {false, false, true}) {
    RecordingSink sink;
    Execution execution(graph, last ? ExecutionOptions() : Retain(), &sink);
    execution.Feed(0, {Full(1)}, true);
    EXPECT_TRUE(sink.Of(leaf).equal(Full(6)));
  }
  RecordingSink sink;
  Execution execution(graph, ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, true);
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "MulBackward0")) << execution.status();
  EXPECT_TRUE(absl::StrContains(execution.status().message(),
                                "backward through the graph a second time"))
      << execution.status();
}

// ---- errors ----

TEST(ExecutionErrors, NamesTheNodeThatThrew) {
  Spy::Body fail = [](const variable_list&) { throw std::runtime_error("out of luck"); };
  const Tensor leaf = Leaf();
  RecordingSink sink;
  const absl::Status status = StatusOf(Spy::apply(leaf, &fail, true)[0], &sink);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(absl::StrContains(status.message(), "Spy")) << status;
  EXPECT_TRUE(absl::EndsWith(status.message(), ": out of luck")) << status;
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(ExecutionErrors, CodesFollowTheException) {
  const std::vector<std::pair<std::function<void()>, absl::StatusCode>> cases = {
      {[] { TORCH_CHECK_VALUE(false, "bad value"); }, absl::StatusCode::kInvalidArgument},
      {[] { TORCH_CHECK_NOT_IMPLEMENTED(false, "none"); }, absl::StatusCode::kUnimplemented},
      {[] { TORCH_CHECK(false, "checked"); }, absl::StatusCode::kInternal},
      {[] { throw 42; }, absl::StatusCode::kInternal},
  };
  for (const auto& [body, code] : cases) {
    Spy::Body fail = [&body = body](const variable_list&) { body(); };
    RecordingSink sink;
    const absl::Status status = StatusOf(Spy::apply(Leaf(), &fail, true)[0], &sink);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "frame #")) << status;
  }
}

TEST(ExecutionErrors, HooksOfEveryKind) {
  const auto thrower = [](const variable_list& v) -> variable_list {
    throw std::runtime_error("hook says no");
    return v;
  };
  const std::vector<std::function<void(const Tensor&, const Tensor&)>> cases = {
      [](const Tensor& root, const Tensor&) {
        root.register_hook([](const Tensor&) { throw std::runtime_error("hook says no"); });
      },
      [&](const Tensor& root, const Tensor&) {
        root.grad_fn()->add_pre_hook(std::make_unique<PreHook>(thrower));
      },
      [&](const Tensor& root, const Tensor&) {
        root.grad_fn()->add_post_hook(std::make_unique<PostHook>(thrower));
      },
      [&](const Tensor& root, const Tensor&) {
        root.grad_fn()->add_retains_grad_hook(std::make_unique<PreHook>(thrower), 0);
      },
      [](const Tensor&, const Tensor& leaf) {
        torch::autograd::impl::set_post_acc_grad_hooks(
            leaf, std::make_unique<PostAccumulateHook>(
                      [](const Tensor&) { throw std::runtime_error("hook says no"); }));
      },
  };
  for (const auto& add_hook : cases) {
    const Tensor leaf = Leaf(), root = leaf * 2;
    add_hook(root, leaf);
    RecordingSink sink;
    const absl::Status status = StatusOf(root, &sink);
    EXPECT_TRUE(absl::EndsWith(status.message(), ": hook says no")) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "MulBackward") ||
                absl::StrContains(status.message(), "AccumulateGrad"))
        << status;
    EXPECT_TRUE(sink.leaves.empty());
  }
}

TEST(ExecutionErrors, AHookThatChangesTheNumberOfGradients) {
  const Tensor root = Leaf() * 2;
  root.grad_fn()->add_post_hook(
      std::make_unique<PostHook>([](const variable_list&) { return variable_list(5); }));
  RecordingSink sink;
  const absl::Status status = StatusOf(root, &sink);
  EXPECT_TRUE(absl::StrContains(status.message(), "number of gradients")) << status;
}

TEST(ExecutionErrors, ChecksWhatANodeReturns) {
  RecordingSink sink;
  const absl::Status status = StatusOf(WrongShape::apply(Leaf()), &sink);
  EXPECT_TRUE(absl::StrContains(status.message(), "WrongShape")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "returned an invalid gradient")) << status;
  Execution execution(GraphOf({{Leaf() * 2}}), ExecutionOptions(), &sink);
  execution.Feed(0, {at::ones({3}, at::kDouble)}, true);
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "SourceNode")) << execution.status();
}

TEST(ExecutionErrors, TheSink) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1);
  StopNode::MakeHistory(stop, received);
  for (const Tensor& root : {received * 2, Leaf() * 2}) {
    RecordingSink sink;
    sink.on_leaf = sink.on_stop = [] { throw std::runtime_error("full"); };
    const absl::Status status = StatusOf(root, &sink);
    EXPECT_TRUE(absl::EndsWith(status.message(), ": full")) << status;
  }
}

TEST(ExecutionErrors, WhatIsFedAfterwardsIsDroppedButEndsInOnIdle) {
  Spy::Body fail = [](const variable_list&) { throw std::runtime_error("first"); };
  Spy::Body never = [](const variable_list&) { ADD_FAILURE(); };
  RecordingSink sink;
  Execution execution(
      GraphOf({{Spy::apply(Leaf(), &fail, true)[0]}, {Spy::apply(Leaf(), &never, true)[0]}}),
      ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, true);
  execution.Feed(1, {Full(1)}, true);
  execution.Cancel(absl::CancelledError("second"));
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "first")) << execution.status();
  EXPECT_EQ(sink.idle, 2);
}

TEST(ExecutionErrors, FeedingWrongly) {
  const auto graph = GraphOf({{Leaf() * 2}});
  RecordingSink sink;
  Execution wrong_count(graph, Retain(), &sink);
  wrong_count.Feed(0, {Full(1), Full(1)}, true);
  EXPECT_EQ(wrong_count.status().code(), absl::StatusCode::kInvalidArgument);
  Execution twice(graph, Retain(), &sink);
  twice.Feed(0, {Full(1)}, true);
  twice.Feed(0, {Full(1)}, true);
  EXPECT_EQ(twice.status().code(), absl::StatusCode::kInternal);
}

TEST(ExecutionErrors, AnomalyModeFindsNan) {
  const torch::autograd::DetectAnomalyGuard guard(/*check_nan=*/true);
  const Tensor leaf = Leaf(-1);
  RecordingSink sink;
  const absl::Status status = StatusOf(at::sqrt(leaf), &sink);
  EXPECT_TRUE(absl::StrContains(status.message(), "SqrtBackward0")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "nan")) << status;
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
  const Tensor root = Spy::apply(Spy::apply(Leaf(), &never, true)[0], &cancel, true)[0];
  execution = std::make_unique<Execution>(GraphOf({{root}}), ExecutionOptions(), &sink);
  execution->Feed(0, {Full(1)}, true);
  EXPECT_EQ(execution->status(), absl::DeadlineExceededError("too late"));
  EXPECT_EQ(sink.idle, 1);
  EXPECT_TRUE(sink.leaves.empty());
}

TEST(Execution, CancelBeforeTheFirstFeed) {
  RecordingSink sink;
  Execution execution(GraphOf({{Leaf() * 2}}), ExecutionOptions(), &sink);
  execution.Cancel(absl::CancelledError("no"));
  EXPECT_EQ(sink.idle, 0);
  execution.Feed(0, {Full(1)}, true);
  EXPECT_TRUE(sink.leaves.empty());
  EXPECT_EQ(sink.idle, 1);
}

TEST(Execution, OnIdleMayFeedMore) {
  const Tensor a = Leaf(), b = Leaf();
  RecordingSink sink;
  Execution execution(GraphOf({{a * 2}, {b * 2}}), ExecutionOptions(), &sink);
  sink.on_idle = [&] {
    EXPECT_TRUE(execution.idle());
    if (sink.idle == 1) execution.Feed(1, {Full(1)}, true);
  };
  execution.Feed(0, {Full(1)}, true);
  EXPECT_EQ(sink.leaves.size(), 2u);
  EXPECT_EQ(sink.idle, 2);
}

TEST(Execution, OnIdleMayDestroyTheExecution) {
  RecordingSink sink;
  auto execution =
      std::make_unique<Execution>(GraphOf({{Leaf() * 2}}), ExecutionOptions(), &sink);
  sink.on_idle = [&] { execution.reset(); };
  Execution* const raw = execution.get();
  raw->Feed(0, {Full(1)}, true);
  EXPECT_EQ(execution, nullptr);
}

TEST(Execution, TheSinkMayFeedAnotherRootMeanwhile) {
  const auto stop = std::make_shared<StopNode>();
  const Tensor received = Full(1), leaf = Leaf();
  StopNode::MakeHistory(stop, received);
  RecordingSink sink;
  Execution execution(GraphOf({{received * 2}, {leaf * 2}}), ExecutionOptions(), &sink);
  sink.on_stop = [&] { execution.Feed(1, {Full(1)}, true); };
  execution.Feed(0, {Full(1)}, true);
  EXPECT_TRUE(sink.Of(leaf).equal(Full(2)));
  EXPECT_EQ(sink.idle, 1);
}

}  // namespace
}  // namespace distgrad
