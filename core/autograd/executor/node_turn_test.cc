// Two threads that come to the same node, of which one waits for its turn.
#include "core/autograd/executor/node_turn.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace distgrad {
namespace {

struct Idle : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

// Few nodes, at which threads meet, and enough of them that some stand in the same part of the
// table. Threads give way in the middle of a turn.
TEST(NodeTurn, OneThreadIsAtANodeAtATime) {
  constexpr int kThreads = 4, kRounds = 20000;
  for (const int count : {1, 3, 200}) {
    std::vector<std::shared_ptr<Idle>> nodes;
    for (int i = 0; i < count; ++i) nodes.push_back(std::make_shared<Idle>());
    std::vector<int> turns(count);  // guarded by the turn
    std::vector<std::atomic<int>> inside(count);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int round = 0; round < kRounds; ++round) {
          const size_t i = random() % count;
          const NodeTurn turn(*nodes[i]);
          EXPECT_TRUE(NodeTurn::IsHeldHere());
          EXPECT_EQ(inside[i]++, 0);
          ++turns[i];
          if (random() % 4 == 0) std::this_thread::yield();
          --inside[i];
        }
        EXPECT_FALSE(NodeTurn::IsHeldHere());
      });
    }
    for (std::thread& thread : threads) thread.join();
    int all = 0;
    for (const int each : turns) all += each;
    EXPECT_EQ(all, kThreads * kRounds) << count << " nodes";
  }
}

}  // namespace
}  // namespace distgrad
