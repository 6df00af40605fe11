// Sums of the gradients for one input, also when many threads add to it.
#include "core/autograd/executor/gradient_slot.h"

#include <ATen/ops/full.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

// In place, so that two owners of one partial sum would be seen.
at::Tensor AddInPlace(at::Tensor held, at::Tensor gradient) {
  EXPECT_EQ(held.use_count(), 1u);
  EXPECT_EQ(gradient.use_count(), 1u);
  return held.add_(gradient);
}

at::Tensor Full(double value) { return at::full({8}, value, at::kDouble); }

TEST(GradientSlot, HoldsOneAndHandsItOutOnce) {
  GradientSlot slot;
  EXPECT_FALSE(slot.Take().defined());
  slot.Add(at::Tensor(), AddInPlace);
  EXPECT_FALSE(slot.Take().defined());
  slot.Add(Full(2), AddInPlace);
  const at::Tensor taken = slot.Take();
  EXPECT_EQ(taken.use_count(), 1u);
  EXPECT_TRUE(taken.equal(Full(2)));
  EXPECT_FALSE(slot.Take().defined());
}

TEST(GradientSlot, AddsTheLaterToTheEarlier) {
  GradientSlot slot;
  slot.Add(Full(1), AddInPlace);
  slot.Add(Full(2), [](at::Tensor held, at::Tensor gradient) {
    EXPECT_TRUE(held.equal(Full(1)));
    EXPECT_TRUE(gradient.equal(Full(2)));
    return held.sub_(gradient);
  });
  EXPECT_TRUE(slot.Take().equal(Full(-1)));
}

TEST(GradientSlot, AThrowingSumLosesBoth) {
  GradientSlot slot;
  slot.Add(Full(1), AddInPlace);
  EXPECT_THROW(
      slot.Add(Full(2),
               [](at::Tensor, at::Tensor) -> at::Tensor { throw std::runtime_error("no"); }),
      std::runtime_error);
  EXPECT_FALSE(slot.Take().defined());
}

TEST(GradientSlot, FreesWhatIsLeft) {
  const at::Tensor kept = Full(1);
  {
    GradientSlot slot;
    slot.Add(kept, AddInPlace);
    EXPECT_EQ(kept.use_count(), 2u);
  }
  EXPECT_EQ(kept.use_count(), 1u);
}

TEST(GradientSlot, ManyThreads) {
  constexpr int kThreads = 4, kTimes = 2000;
  GradientSlot slot;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&slot] {
      for (int n = 0; n < kTimes; ++n) slot.Add(Full(1), AddInPlace);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(slot.Take().equal(Full(kThreads * kTimes)));
}

}  // namespace
}  // namespace distgrad
