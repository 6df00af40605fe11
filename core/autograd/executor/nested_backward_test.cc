// Backwards within nodes: those that are allowed, and those that are errors.
#include "core/autograd/executor/nested_backward.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "core/autograd/executor/executor_testing.h"
#include "core/autograd/executor/post_accumulate.h"
#include "core/base/blocking_observer.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor Leaf(double value = 1) { return at::full({2}, value, at::kDouble).requires_grad_(); }
Tensor Full(double value) { return at::full({2}, value, at::kDouble); }

absl::Status StatusOf(const Tensor& root, RecordingSink* sink) {
  Execution execution(GraphOf({{root}}), ExecutionOptions(), sink);
  execution.Feed(0, {at::ones_like(root)}, {true});
  return execution.status();
}

// Runs `body` in a node, with gradients recorded, as a checkpointed function computes again.
absl::Status InNode(const std::function<void()>& body) {
  Spy::Body in_node = [&](const variable_list&) {
    const at::AutoGradMode on(true);
    body();
  };
  RecordingSink sink;
  return StatusOf(Watch(Leaf(), &in_node), &sink);
}

TEST(NestedBackward, ALeafThatOutlivesTheNodeIsAnError) {
  const Tensor parameter = Leaf(3);
  const absl::Status status = InNode([&] {
    const Tensor input = Leaf(2);
    (input * parameter).backward(Full(1));
    EXPECT_TRUE(input.grad().equal(Full(3)));
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "torch::autograd::grad")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "[2]")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "Spy")) << status;
}

// It has no version that would tell of the addition.
TEST(NestedBackward, AGradientOfInferenceModeThatIsAddedToIsAnErrorToo) {
  const Tensor parameter = Leaf(3);
  {
    const c10::InferenceMode mode;
    parameter.mutable_grad() = Full(1);
  }
  const absl::Status status = InNode([&] {
    const Tensor product = Leaf(2) * parameter;
    const c10::InferenceMode mode;
    product.backward(Full(1));
  });
  EXPECT_TRUE(parameter.grad().equal(Full(3))) << parameter.grad();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// What it has added until then is missing, though the node goes on.
TEST(NestedBackward, OneThatFailsAndIsCaughtIsAnErrorToo) {
  const Tensor parameter = Leaf(3);
  Spy::Body fails = [](const variable_list&) { throw std::runtime_error("on fire"); };
  const absl::Status status = InNode([&] {
    EXPECT_THROW((Watch(Leaf(), &fails) * parameter).backward(Full(1)), std::runtime_error);
  });
  EXPECT_TRUE(parameter.grad().defined());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "[2]")) << status;
}

TEST(NestedBackward, LeavesThatTheNodeMadeAreItsOwn) {
  EXPECT_TRUE(InNode([] {
                const Tensor input = Leaf(2), copy = Leaf(3);
                for (int i = 1; i <= 2; ++i) {
                  (input * copy).backward(Full(1));
                  EXPECT_TRUE(input.grad().equal(Full(3 * i)));
                  EXPECT_TRUE(copy.grad().equal(Full(2 * i)));
                }
              }).ok());
}

TEST(NestedBackward, GradAndLeavesThatGetNothingAreNoError) {
  const Tensor parameter = Leaf(3);
  Spy::Body nothing = [](const variable_list&) {};
  const absl::Status status = InNode([&] {
    const Tensor input = Leaf(2);
    const Tensor product = input * parameter;
    const variable_list got = torch::autograd::grad({product}, {input, parameter}, {Full(1)});
    EXPECT_TRUE(got[1].equal(Full(2)));
    // Reached, but given no gradient.
    const Tensor second = Spy::apply(parameter, &nothing, /*materialize=*/false)[1];
    (second + Leaf()).backward(Full(1));
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(parameter.grad().defined());
}

// A pass that calls the leaf's post-accumulate hook, say: its gradient comes and goes, and the
// backward has added nothing.
TEST(NestedBackward, AGradientThatIsInPlaceForAWhileIsNoChange) {
  const Tensor parameter = Leaf(3);
  absl::Notification in_place, go;
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<PostAccumulateHook>([&](const Tensor&) {
        if (!in_place.HasBeenNotified()) in_place.Notify();
        go.WaitForNotification();
      }));
  std::thread other([&] {
    auto leaf = torch::autograd::impl::grad_accumulator(parameter);
    CallPostAccumulateHook(
        static_cast<torch::autograd::AccumulateGrad&>(*leaf), [] { return Full(1); },
        [](Tensor) {});
  });
  in_place.WaitForNotification();
  // The hook is over at the latest in the middle of the backward; before it, where that waits.
  const auto release = [&] {
    if (!go.HasBeenNotified()) go.Notify();
  };
  struct Releaser : BlockingObserver {
    explicit Releaser(const std::function<void()>& r) : release(r) {}
    void OnBlocking() override { release(); }
    const std::function<void()> release;
  };
  Spy::Body nothing = [](const variable_list&) {};
  Spy::Body join = [&](const variable_list&) {
    release();
    other.join();
  };
  const absl::Status status = InNode([&] {
    const Releaser releaser(release);
    const Tensor second = Spy::apply(parameter, &nothing, /*materialize=*/false)[1];
    (second + Watch(Leaf(), &join)).backward(Full(1));
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(NestedBackward, AHookOfALeafMayRunABackwardThatReachesIt) {
  const Tensor parameter = Leaf(3);
  bool inside = false;
  Spy::Body nothing = [](const variable_list&) {};
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<PostAccumulateHook>([&](const Tensor&) {
        if (std::exchange(inside, true)) return;
        const at::AutoGradMode on(true);
        const Tensor second = Spy::apply(parameter, &nothing, /*materialize=*/false)[1];
        const Tensor own = Leaf();
        (second + own).backward(Full(1));
      }));
  RecordingSink sink;
  const absl::Status status = StatusOf(parameter * 2, &sink);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(NestedBackward, ABackwardInABackwardInANode) {
  const Tensor parameter = Leaf(3);
  Spy::Body inner = [&](const variable_list&) {
    const at::AutoGradMode on(true);
    (Leaf() * parameter).backward(Full(1));
  };
  EXPECT_EQ(InNode([&] { Watch(Leaf(), &inner).backward(Full(1)); }).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(NestedBackward, AHookIsPartOfItsNode) {
  const Tensor parameter = Leaf(3), leaf = Leaf();
  const Tensor hooked = leaf * 2;
  hooked.register_hook([&](const Tensor&) {
    const at::AutoGradMode on(true);
    (parameter * 2).backward(Full(1));
  });
  RecordingSink sink;
  EXPECT_EQ(StatusOf(hooked * 2, &sink).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(NestedBackward, OutsideOfNodesItIsAsEver) {
  EXPECT_TRUE(InNode([] {}).ok());
  const Tensor parameter = Leaf(3);
  (parameter * 2).backward(Full(1));
  EXPECT_TRUE(parameter.grad().equal(Full(2)));
}

}  // namespace
}  // namespace distgrad
