// Executions on several threads, on small stacks, and under thread-local state of others.
#include <ATen/autocast_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <pthread.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "core/autograd/executor/execution.h"
#include "core/autograd/executor/executor_testing.h"
#include "core/autograd/executor/graph.h"
#include "core/base/blocking.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor Full(double value) { return at::full({2}, value, at::kDouble); }

void RunThreads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

// Runs `body` on a thread with a stack on which a recursion over the graph would not fit.
void RunOnSmallStack(std::function<void()> body) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 * 1024), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void* argument) -> void* {
                  (*static_cast<std::function<void()>*>(argument))();
                  return nullptr;
                },
                &body),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

// Whole numbers in doubles: sums do not depend on their order, so they can be compared.
TEST(ExecutionThreads, RootsFedFromSeveralThreads) {
  constexpr int kRoots = 8, kThreads = 4, kValues = 60;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Tensor a = Full(1).requires_grad_(), b = Full(2).requires_grad_();
    std::vector<Tensor> values = {a, b};
    for (int i = 0; i < kValues; ++i) {
      const auto pick = [&] {
        return values[values.size() - 1 - random() % std::min<size_t>(values.size(), 12)];
      };
      values.push_back(i % 3 == 0 ? pick() * 2 : pick() - pick());
    }
    std::vector<std::vector<Tensor>> roots;
    for (int i = 0; i < kRoots; ++i) roots.push_back({values[values.size() - 1 - i]});
    const auto graph = GraphOf(roots);
    RecordingSink sink;
    ExecutionOptions options;
    options.retain_graph = true;
    Execution execution(graph, options, &sink);
    RunThreads(kThreads, [&](int thread) {
      for (int i = thread; i < kRoots; i += kThreads) {
        const bool reached = (seed + i) % 3 != 0;
        execution.Feed(i, {reached ? Full(i + 1) : Tensor()}, {reached});
      }
    });
    ASSERT_TRUE(execution.status().ok()) << execution.status();
    EXPECT_TRUE(execution.idle());
    EXPECT_GE(sink.idle, 1);
    EXPECT_LE(sink.idle, kRoots);

    std::vector<Tensor> fed, gradients;
    for (int i = 0; i < kRoots; ++i) {
      if ((seed + i) % 3 == 0) continue;
      fed.push_back(roots[i][0]);
      gradients.push_back(Full(i + 1));
    }
    torch::autograd::backward(fed, gradients);
    for (const Tensor& leaf : {a, b}) {
      ASSERT_EQ(sink.Of(leaf).defined(), leaf.grad().defined());
      if (!leaf.grad().defined()) continue;
      EXPECT_TRUE(sink.Of(leaf).equal(leaf.grad()));
    }
  }
}

TEST(ExecutionThreads, ManyEdgesIntoOneInput) {
  constexpr int kRoots = 400, kThreads = 4;
  const Tensor leaf = Full(1).requires_grad_(), trunk = leaf * 3;
  std::vector<std::vector<Tensor>> roots;
  for (int i = 0; i < kRoots; ++i) roots.push_back({trunk * 2});
  RecordingSink sink;
  Execution execution(GraphOf(roots), ExecutionOptions(), &sink);
  RunThreads(kThreads, [&](int thread) {
    for (int i = thread; i < kRoots; i += kThreads) execution.Feed(i, {Full(i)}, {true});
  });
  EXPECT_TRUE(sink.Of(leaf).equal(Full(6.0 * kRoots * (kRoots - 1) / 2)));
}

TEST(ExecutionThreads, AnErrorStopsAllThreads) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 20; ++round) {
    Spy::Body fail = [](const variable_list&) { throw std::runtime_error("no"); };
    std::vector<std::vector<Tensor>> roots;
    for (int i = 0; i < kThreads; ++i) {
      Tensor root = Full(1).requires_grad_();
      for (int n = 0; n < 50; ++n) root = i == 2 && n == 25 ? Watch(root, &fail) : root * 2;
      roots.push_back({root});
    }
    RecordingSink sink;
    Execution execution(GraphOf(roots), ExecutionOptions(), &sink);
    RunThreads(kThreads, [&](int thread) { execution.Feed(thread, {Full(1)}, {true}); });
    EXPECT_TRUE(absl::EndsWith(execution.status().message(), ": no")) << execution.status();
    EXPECT_TRUE(execution.idle());
    EXPECT_GE(sink.idle, 1);
  }
}

TEST(ExecutionThreads, CancelFromAnotherThread) {
  for (int round = 0; round < 20; ++round) {
    Tensor root = Full(1).requires_grad_();
    for (int n = 0; n < 200; ++n) root = root * 1;
    RecordingSink sink;
    Execution execution(GraphOf({{root}}), ExecutionOptions(), &sink);
    RunThreads(2, [&](int thread) {
      if (thread == 0) execution.Feed(0, {Full(1)}, {true});
      if (thread == 1) execution.Cancel(absl::CancelledError("enough"));
    });
    EXPECT_EQ(execution.status(), absl::CancelledError("enough"));
    EXPECT_EQ(sink.idle, 1);
  }
}

TEST(ExecutionThreads, NodesSeeTheStateOfTheThreadThatMadeTheExecution) {
  bool ran = false;
  Spy::Body look = [&](const variable_list&) {
    ran = true;
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  };
  const Tensor root = Watch(Full(1).requires_grad_(), &look);
  RecordingSink sink;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  Execution execution(GraphOf({{root}}), ExecutionOptions(), &sink);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  sink.on_idle = [] {
    EXPECT_TRUE(at::GradMode::is_enabled());
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  };
  RunThreads(1, [&](int) { execution.Feed(0, {Full(1)}, {true}); });
  EXPECT_TRUE(ran);
}

TEST(ExecutionThreads, BackwardsInsideNodesNest) {
  int depth = 0;
  Spy::Body nest = [&](const variable_list&) {
    const at::AutoGradMode on(true);
    if (++depth > 5) return;
    const Tensor own = Full(1).requires_grad_();
    // libtorch's engine inside ours, and ours inside libtorch's.
    if (depth % 2 == 1) {
      torch::autograd::backward({Watch(own, &nest)}, {Full(1)});
      EXPECT_TRUE(own.grad().equal(Full(1)));
    } else {
      RecordingSink sink;
      Execution execution(GraphOf({{Watch(own, &nest)}}), ExecutionOptions(), &sink);
      EXPECT_FALSE(MayRunNodesHere());
      RunThreads(1, [&](int) { execution.Feed(0, {Full(1)}, {true}); });
      EXPECT_TRUE(execution.status().ok()) << execution.status();
      EXPECT_TRUE(sink.Of(own).equal(Full(1)));
    }
  };
  const Tensor leaf = Full(1).requires_grad_();
  RecordingSink sink;
  Execution execution(GraphOf({{Watch(leaf, &nest)}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_TRUE(sink.Of(leaf).equal(Full(1)));
  EXPECT_EQ(depth, 6);
}

TEST(ExecutionThreads, DeepGraphsNeedNoDeepStack) {
  constexpr int kDepth = 200'000;
  RunOnSmallStack([] {
    const Tensor leaf = Full(1).requires_grad_();
    Tensor root = leaf;
    for (int i = 0; i < kDepth; ++i) root = root * 1;
    auto graph = GraphOf({{root}});
    root = Tensor();
    ASSERT_GE(graph->size(), size_t{kDepth});
    RecordingSink sink;
    auto execution = std::make_unique<Execution>(graph, ExecutionOptions(), &sink);
    execution->Feed(0, {Full(7)}, {true});
    EXPECT_TRUE(sink.Of(leaf).equal(Full(7)));
    execution.reset();
    graph.reset();
  });
}

TEST(ExecutionThreads, DeepGraphsThatAreNotReachedNeedNoDeepStackEither) {
  constexpr int kDepth = 200'000;
  RunOnSmallStack([] {
    Tensor root = Full(1).requires_grad_();
    for (int i = 0; i < kDepth; ++i) root = root * 1;
    RecordingSink sink;
    Execution execution(GraphOf({{root}}), ExecutionOptions(), &sink);
    root = Tensor();
    execution.Feed(0, {Tensor()}, {false});
    EXPECT_TRUE(sink.leaves.empty());
    EXPECT_EQ(sink.idle, 1);
  });
}

// A node that a thread ran within another one might wait for the mutex that the thread holds.
TEST(ExecutionThreads, NoNodesRunWithinANode) {
  EXPECT_TRUE(MayRunNodesHere());
  std::vector<bool> in_node, in_hook, in_libtorch, after_accumulate;
  Spy::Body body = [&](const variable_list&) { in_node.push_back(MayRunNodesHere()); };
  const Tensor leaf = Full(1).requires_grad_();
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<PostAccumulateHook>(
                [&](const Tensor&) { after_accumulate.push_back(MayRunNodesHere()); }));
  const Tensor root = Watch(leaf, &body);
  root.register_hook([&](const Tensor&) { in_hook.push_back(MayRunNodesHere()); });
  RecordingSink sink;
  Execution execution(GraphOf({{root}}), ExecutionOptions(), &sink);
  execution.Feed(0, {Full(1)}, {true});
  EXPECT_TRUE(execution.status().ok()) << execution.status();
  EXPECT_EQ(in_hook, std::vector<bool>{true}) << "no mutex is held there";
  EXPECT_EQ(in_node, std::vector<bool>{false});
  EXPECT_EQ(after_accumulate, std::vector<bool>{false});

  Spy::Body other = [&](const variable_list&) { in_libtorch.push_back(MayRunNodesHere()); };
  torch::autograd::backward({Watch(Full(1).requires_grad_(), &other)}, {Full(1)});
  EXPECT_EQ(in_libtorch, std::vector<bool>{false});
  EXPECT_TRUE(MayRunNodesHere());
}

// Runs the nodes of `root` on two threads, on the second one once the first has counted in `runs`.
// `second`: what that one says of its waits.
void RunTwice(const Tensor& root, const std::atomic<int>& runs, Blockable* second) {
  const auto run = [&] {
    RecordingSink sink;
    Execution execution(GraphOf({{root}}), ExecutionOptions{.retain_graph = true}, &sink);
    execution.Feed(0, {Full(1)}, {true});
    EXPECT_TRUE(execution.status().ok()) << execution.status();
  };
  RunThreads(2, [&](int thread) {
    if (thread == 0) return run();
    while (runs == 0) std::this_thread::yield();
    Blockable::SetCurrent(second);
    run();
    Blockable::SetCurrent(nullptr);
  });
}

// Whoever waits for its turn at a node can be done without.
TEST(ExecutionThreads, WhoeverWaitsForANodeSaysSo) {
  struct Waits : Blockable {
    void OnBlocked() override { blocked.Notify(); }
    void OnUnblocked() override { ++unblocked; }
    absl::Notification blocked;
    int unblocked = 0;
  } waits;
  std::atomic<int> inside{0}, runs{0};
  Spy::Body body = [&](const variable_list&) {
    EXPECT_EQ(++inside, 1);
    if (++runs == 1) waits.blocked.WaitForNotificationWithTimeout(absl::Seconds(30));
    --inside;
  };
  const Tensor root = Watch(Full(1).requires_grad_(), &body);
  RunTwice(root, runs, &waits);
  EXPECT_TRUE(waits.blocked.HasBeenNotified());
  EXPECT_EQ(waits.unblocked, 1);
  EXPECT_EQ(runs, 2);
}

// What retain_grad() adds to is the tensor's own .grad, for all passes.
TEST(ExecutionThreads, OneThreadAtATimeRetainsAGradient) {
  struct Waits : Blockable {
    void OnBlocked() override { other_has_come.Notify(); }
    void OnUnblocked() override {}
    absl::Notification other_has_come;
  } waits;
  std::atomic<int> inside{0}, runs{0};
  const Tensor root = Full(1).requires_grad_() * 2;
  root.grad_fn()->add_retains_grad_hook(
      std::make_unique<PreHook>([&](variable_list gradients) {
        EXPECT_EQ(++inside, 1);
        if (++runs == 1) {
          waits.other_has_come.WaitForNotificationWithTimeout(absl::Seconds(30));
        } else if (!waits.other_has_come.HasBeenNotified()) {
          waits.other_has_come.Notify();
        }
        --inside;
        return gradients;
      }),
      0);
  RunTwice(root, runs, &waits);
  EXPECT_EQ(runs, 2);
}

}  // namespace
}  // namespace distgrad
