// Nested values taken apart, and put together again.
#include "core/tensor/nested.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace distgrad {
namespace {

using Batch = std::tuple<at::Tensor, std::vector<std::pair<at::Tensor, int>>,
                         std::map<std::string, std::optional<at::Tensor>>>;

at::Tensor Number(double value) { return at::full({}, value); }

Batch NewBatch() {
  return {Number(1), {{Number(2), 20}, {Number(3), 30}}, {{"a", Number(4)}, {"b", std::nullopt}}};
}

TEST(NestedTest, ItsTensorsComeInOrderAndGoBackToTheirPlaces) {
  const Batch batch = NewBatch();
  std::vector<at::Tensor> tensors = TensorsOf(batch);
  ASSERT_EQ(tensors.size(), 4u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].item<double>(), static_cast<double>(i) + 1);
    tensors[i] = tensors[i].mul(10);
  }
  const auto [first, list, map] = WithTensors(batch, tensors);
  EXPECT_EQ(first.item<double>(), 10);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].first.item<double>(), 20);
  EXPECT_EQ(list[1].first.item<double>(), 30);
  EXPECT_EQ(list[1].second, 30) << "a plain value is copied";
  ASSERT_EQ(map.size(), 2u);
  EXPECT_EQ(map.at("a")->item<double>(), 40);
  EXPECT_FALSE(map.at("b").has_value());
  EXPECT_EQ(std::get<0>(batch).item<double>(), 1) << "it was not written to";
}

TEST(NestedTest, ArraysAndMapsOfAnyOrderHoldTensors) {
  using Map = std::map<std::string, at::Tensor, std::greater<>>;
  const std::pair<std::array<at::Tensor, 2>, Map> value{{Number(1), Number(2)},
                                                        {{"a", Number(4)}, {"b", Number(3)}}};
  std::vector<at::Tensor> tensors = TensorsOf(value);
  ASSERT_EQ(tensors.size(), 4u);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].item<double>(), static_cast<double>(i) + 1);
    tensors[i] = tensors[i].mul(10);
  }
  const auto [array, map] = WithTensors(value, tensors);
  EXPECT_EQ(array[1].item<double>(), 20);
  EXPECT_EQ(map.at("a").item<double>(), 40);
  using Of = Nested<Map>;
  EXPECT_TRUE(Of::kTensors);
  EXPECT_TRUE(Of::Alike(value.second, map));
  EXPECT_FALSE(Of::Alike(value.second, Map{{"a", Number(4)}}));
}

TEST(NestedTest, TensorsOfAnotherNumberAreRefused) {
  const Batch batch = NewBatch();
  std::vector<at::Tensor> tensors = TensorsOf(batch);
  tensors.pop_back();
  EXPECT_THROW(WithTensors(batch, tensors), std::invalid_argument);
  tensors.resize(5, Number(0));
  EXPECT_THROW(WithTensors(batch, tensors), std::invalid_argument);
}

}  // namespace
}  // namespace distgrad
