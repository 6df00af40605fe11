// Extents of views, and tensors that reach behind their storage.
#include "core/tensor/extent.h"

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace distgrad {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

TEST(ExtentTest, GoesFromTheFirstElementToTheEndOfTheFurthest) {
  const at::Tensor all = at::arange(24, at::kInt).view({2, 3, 4});
  EXPECT_EQ(ExtentOf(all), 24 * 4u);
  EXPECT_EQ(ExtentOf(all.permute({2, 0, 1})), 24 * 4u);
  EXPECT_EQ(ExtentOf(all.select(0, 1)), 12 * 4u) << "what is before it does not count";
  EXPECT_EQ(ExtentOf(all.select(2, 0)), 21 * 4u);
  EXPECT_EQ(ExtentOf(all.slice(2, 1, 4, 2)), (20 + 3) * 4u);
  EXPECT_EQ(ExtentOf(at::ones({}, at::kDouble)), 8u);
  EXPECT_EQ(ExtentOf(at::ones({1}).expand({5, 7})), 4u);
  EXPECT_EQ(ExtentOf(at::empty({3, 0, 5})), 0u);
}

TEST(ExtentTest, TheEndOfTheStorageIsTheLastThatIsInMemory) {
  at::Tensor tensor = at::ones({10, 10});
  // Views that nobody can make of it later.
  const at::Tensor turned = tensor.t(), row = tensor.select(0, 9), column = tensor.select(1, 9);
  const at::Tensor before = tensor.slice(0, 0, 9), none = tensor.slice(0, 10, 10);
  for (const at::Tensor& each : {tensor, turned, row, column, before, none}) {
    EXPECT_TRUE(IsInMemory(each));
  }
  tensor.storage().set_nbytes(100 * sizeof(float) - 1);
  for (const at::Tensor& each : {tensor, turned, row, column}) EXPECT_FALSE(IsInMemory(each));
  EXPECT_TRUE(IsInMemory(before));
  tensor.storage().set_nbytes(0);
  EXPECT_FALSE(IsInMemory(before));
  EXPECT_TRUE(IsInMemory(none));
  EXPECT_FALSE(IsInMemory(at::_efficientzerotensor({2})));
  EXPECT_TRUE(IsInMemory(at::_efficientzerotensor({0})));
}

// No number of bytes that wraps around is taken for a small one.
TEST(ExtentTest, WhatIsTooFarForANumberIsInNoMemory) {
  const auto as = [](at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
    at::Tensor tensor = at::ones({4});
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    return tensor;
  };
  constexpr uint64_t kTooFar = std::numeric_limits<uint64_t>::max();
  // A dimension alone, a sum of them, and the bytes of an element.
  EXPECT_EQ(ExtentOf(as({5}, {kMost}, 0)), kTooFar);
  EXPECT_EQ(ExtentOf(as({2, 2, 2, 2}, {kMost, kMost, kMost, kMost}, 0)), kTooFar);
  EXPECT_EQ(ExtentOf(as({2}, {int64_t{1} << 62}, 0)), kTooFar);
  EXPECT_EQ(ExtentOf(as({3}, {int64_t{1} << 59}, 0)), ((uint64_t{1} << 60) + 1) * 4);
  EXPECT_FALSE(IsInMemory(as({5}, {kMost}, 0)));
  EXPECT_FALSE(IsInMemory(as({2}, {int64_t{1} << 62}, 0)));
  EXPECT_FALSE(IsInMemory(as({1}, {1}, kMost)));
  EXPECT_FALSE(IsInMemory(as({1}, {1}, int64_t{1} << 62)));
  EXPECT_FALSE(IsInMemory(as({2}, {(int64_t{1} << 61) - 1}, int64_t{1} << 61)));
  EXPECT_TRUE(IsInMemory(as({2}, {1}, 2)));
}

}  // namespace
}  // namespace distgrad
