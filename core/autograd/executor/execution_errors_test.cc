// What becomes of exceptions in nodes, hooks and sinks.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sqrt.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/executor_testing.h"
#include "core/base/origin.h"
#include "core/tensor/exception.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Tensor Leaf(double value = 1) { return at::full({2}, value, at::kDouble).requires_grad_(); }
Tensor Full(double value) { return at::full({2}, value, at::kDouble); }

struct WrongShape : torch::autograd::Function<WrongShape> {
  static Variable forward(AutogradContext*, const Variable& a) { return a.clone(); }
  static variable_list backward(AutogradContext*, variable_list) {
    return {at::ones({7}, at::kDouble)};
  }
};

// Runs what leads from `root`, fed with ones, and which ends in one burst.
absl::Status StatusOf(const Tensor& root, RecordingSink* sink) {
  Execution execution(GraphOf({{root}}), ExecutionOptions(), sink);
  execution.Feed(0, {at::ones_like(root)}, {true});
  EXPECT_EQ(sink->idle, 1);
  EXPECT_TRUE(execution.idle());
  return execution.status();
}

TEST(ExecutionErrors, NamesTheNodeThatThrew) {
  Spy::Body fail = [](const variable_list&) { throw std::runtime_error("out of luck"); };
  const Tensor leaf = Leaf();
  RecordingSink sink;
  const absl::Status status = StatusOf(Watch(leaf, &fail), &sink);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(absl::StrContains(status.message(), "Spy")) << status;
  EXPECT_TRUE(absl::EndsWith(status.message(), ": out of luck")) << status;
  EXPECT_TRUE(sink.leaves.empty());
}

// A hook's call to another worker, say, whose error it throws.
TEST(ExecutionErrors, KeepsTheErrorsOrigin) {
  const ErrorOrigin origin{7, ErrorOrigin::By::kHandler};
  Spy::Body fail = [&](const variable_list&) {
    throw StatusError(WithOrigin(absl::NotFoundError("no such record"), origin));
  };
  RecordingSink sink;
  const absl::Status status = StatusOf(Watch(Leaf(), &fail), &sink);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_EQ(OriginOf(status), origin) << status;
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
    const absl::Status status = StatusOf(Watch(Leaf(), &fail), &sink);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "frame #")) << status;
  }
}

// As in libtorch: in place of the leaf there is something that was computed.
TEST(ExecutionErrors, ALeafThatIsNoneAnyMoreGetsNoGradient) {
  Tensor leaf = Leaf();
  const Tensor root = leaf * Full(3), same = leaf * Full(3);
  leaf.requires_grad_(false);
  leaf.add_(Leaf());
  RecordingSink sink;
  const absl::Status status = StatusOf(root, &sink);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_TRUE(absl::EndsWith(status.message(), "moved into the graph interior")) << status;
  EXPECT_TRUE(sink.leaves.empty());
  EXPECT_THROW(same.sum().backward(), std::logic_error);
}

// Whoever feeds it, a thread of the pool, say, has nobody to tell.
TEST(ExecutionErrors, WithoutMemoryItFails) {
  int failures = 0;
  for (int count = 1; count <= 3; ++count) {
    bool failed = true;
    for (int nth = 0; failed; ++nth) {
      SCOPED_TRACE(testing::Message() << count << " allocations from " << nth);
      const Tensor leaf = Leaf();
      const Tensor root = (leaf * 2).sqrt() + leaf;
      RecordingSink sink;
      Execution execution(GraphOf({{root}}), ExecutionOptions(), &sink);
      variable_list gradients = {at::ones_like(root)};
      FailAllocation(nth, count);
      execution.Feed(0, std::move(gradients), {true});
      failed = FailAllocation(-1);
      EXPECT_EQ(sink.idle, 1);
      EXPECT_TRUE(execution.idle());
      const absl::StatusCode code = execution.status().code();
      failures += code == absl::StatusCode::kResourceExhausted ? 1 : 0;
      EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kResourceExhausted)
          << execution.status();
      EXPECT_EQ(sink.Of(leaf).defined(), code == absl::StatusCode::kOk);
    }
  }
  EXPECT_GT(failures, 0);
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
  execution.Feed(0, {at::ones({3}, at::kDouble)}, {true});
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "SourceNode")) << execution.status();
}

// What a node makes, and the sum of two gradients that came for it.
TEST(ExecutionErrors, ALimitedNodeAllocatesNoMore) {
  const Tensor wide = Leaf().expand({1000, 2});
  const Tensor gradient = Full(1).expand({1000, 2});
  const auto status_of = [](std::vector<std::vector<Tensor>> roots, const Tensor& gradient,
                            bool limited) {
    const std::shared_ptr<const Graph> graph = GraphOf(roots);
    ExecutionOptions options;
    options.limited.resize(graph->size(), limited);
    options.limit_bytes = 1000;
    options.limit_name = "limit of test";
    RecordingSink sink;
    Execution execution(graph, options, &sink);
    for (size_t i = 0; i < roots.size(); ++i) {
      execution.Feed(static_cast<Graph::Index>(i), {gradient}, {true});
    }
    return execution.status();
  };
  for (const absl::Status& status : {status_of({{wide.select(0, 1)}}, Full(1), true),
                                     status_of({{wide}, {wide}}, gradient, true)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "it would allocate 16000 bytes, after 0; limit of test is 1000"))
        << status;
  }
  EXPECT_TRUE(status_of({{wide.select(0, 1)}}, Full(1), false).ok());
  EXPECT_TRUE(status_of({{wide}, {wide}}, gradient, false).ok());
  EXPECT_TRUE(status_of({{wide}}, gradient, true).ok());
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
  Execution execution(GraphOf({{Watch(Leaf(), &fail)}, {Watch(Leaf(), &never)}}),
                      ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  execution.Feed(1, {Full(1)}, {true});
  execution.Cancel(absl::CancelledError("second"));
  EXPECT_TRUE(absl::StrContains(execution.status().message(), "first")) << execution.status();
  EXPECT_EQ(sink.idle, 2);
}

TEST(ExecutionErrors, FeedingWrongly) {
  const auto graph = GraphOf({{Leaf() * 2}});
  RecordingSink sink;
  ExecutionOptions retain;
  retain.retain_graph = true;
  Execution wrong_count(graph, retain, &sink);
  wrong_count.Feed(0, {Full(1), Full(1)}, {true});
  EXPECT_EQ(wrong_count.status().code(), absl::StatusCode::kInvalidArgument);
  Execution twice(graph, retain, &sink);
  twice.Feed(0, {Full(1)}, {true});
  twice.Feed(0, {Full(1)}, {true});
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

}  // namespace
}  // namespace distgrad
