// Calls of operators that count as cheap, and those that do not.
#include "core/tensor/cheap_operators.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor Of(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::zeros(sizes, type);
}

TEST(CheapOperatorsTest, WhatReadsAndMakesLittleIsCheap) {
  for (const auto& [name, tensors] : std::vector<std::pair<std::string, Tensors>>{
           {"aten::neg", {Of({64, 64})}},
           {"aten::neg", {Of({})}},
           {"aten::neg", {Of({0, 100})}},
           {"aten::add.Tensor", {Of({32, 1}), Of({1, 64})}},
           {"aten::add_.Tensor", {Of({32, 32}), Of({32})}},
           {"aten::add.out", {Of({32}), Of({32}), Of({32})}},
           {"aten::clamp.Tensor", {Of({32}), at::Tensor(), Of({32})}},
           {"aten::sum.dim_IntList", {Of({64, 64})}},
           {"aten::transpose.int", {Of({64, 64})}},
           {"aten::mm", {Of({64, 32}), Of({32, 64})}},
           {"aten::matmul", {Of({64, 32}), Of({32, 64})}},
           {"aten::linear", {Of({64, 32}), Of({64, 32})}},
           {"aten::linear", {Of({1, 10}), Of({100, 10}), Of({100})}}}) {
    EXPECT_TRUE(CheapToRunInline(name, tensors)) << name;
  }
}

TEST(CheapOperatorsTest, WhatReadsMuchIsNot) {
  EXPECT_FALSE(CheapToRunInline("aten::neg", {Of({64, 65})}));
  EXPECT_FALSE(CheapToRunInline("aten::neg", {Of({64, 64}, at::kDouble)}));
  EXPECT_FALSE(CheapToRunInline("aten::sum", {Of({1}).expand({1 << 20})}));
  EXPECT_FALSE(CheapToRunInline("aten::mm", {Of({1, 5000}), Of({5000, 1})}));
}

TEST(CheapOperatorsTest, WhatMayMakeMuchOfLittleIsNot) {
  for (const auto& [name, tensors] : std::vector<std::pair<std::string, Tensors>>{
           {"aten::add.Tensor", {Of({2048, 1}), Of({1, 2048})}},
           {"aten::lerp.Tensor", {Of({17, 1, 1}), Of({17, 1}), Of({17})}},
           {"aten::lerp.Tensor", {Of({1 << 11, 1, 1}), Of({1 << 10, 1}), Of({1 << 10})}},
           {"aten::mm", {Of({2048, 1}), Of({1, 2048})}},
           {"aten::matmul", {Of({65, 1}), Of({1, 65})}},
           {"aten::matmul", {Of({16, 4, 1}), Of({16, 1, 4})}},
           {"aten::linear", {Of({65, 1}), Of({65, 1})}},
           {"aten::mm", {Of({int64_t{1} << 32, 0}), Of({0, int64_t{1} << 32})}},
           {"aten::linear", {Of({int64_t{1} << 33, 0}), Of({int64_t{1} << 31, 0})}},
           {"aten::new_ones", {Of({1})}},
           {"aten::ones_like", {Of({1})}},
           {"aten::repeat", {Of({1})}},
           {"aten::expand", {Of({1})}},
           {"aten::bincount", {Of({1}, at::kLong)}},
           {"aten::one_hot", {Of({1}, at::kLong)}},
           {"aten::cat", {Of({1})}},
           {"aten::index_select", {Of({1}), Of({1}, at::kLong)}},
           {"aten::arange", {}},
           {"aten::neg", {}},
           {"aten::neg", {Of({1}).to_sparse()}},
           {"aten::neg", {at::empty({1}, at::kMeta)}},
           {"custom::neg", {Of({1})}},
           {"neg", {Of({1})}}}) {
    EXPECT_FALSE(CheapToRunInline(name, tensors)) << name;
  }
}

}  // namespace
}  // namespace distgrad
