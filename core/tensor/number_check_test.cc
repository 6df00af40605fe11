// Which numbers an operator is not to be called with, and that those next to them are taken.
#include "core/tensor/number_check.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/tensor/find_operator.h"

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;
using Ints = std::vector<int64_t>;

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

void ExpectRefused(const std::string& name, const Values& arguments) {
  const absl::Status status = CheckNumbers(FindOperator(name).value(), arguments);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << ": " << status;
}
void ExpectTaken(const std::string& name, const Values& arguments) {
  EXPECT_EQ(CheckNumbers(FindOperator(name).value(), arguments), absl::OkStatus()) << name;
}

at::Tensor Longs(int64_t number) { return at::full({2}, number, at::kLong); }

TEST(NumberCheckTest, TheLeastNumberIsNotDividedByMinusOne) {
  const at::Tensor least_of_32 = at::full({2}, std::numeric_limits<int32_t>::min(), at::kInt);
  for (const char* const name :
       {"aten::div.Tensor_mode", "aten::div_.Tensor_mode", "aten::divide.Tensor_mode",
        "aten::floor_divide", "aten::remainder.Tensor", "aten::fmod.Tensor"}) {
    ExpectRefused(name, {Longs(kLeast), Longs(-1), "trunc"});
    ExpectRefused(name, {Longs(kLeast), at::full({2}, -1, at::kChar), "trunc"});
    ExpectRefused(name, {least_of_32, at::full({2}, -1, at::kInt), "trunc"});
    // One number is converted to the type of the other argument, and may become another.
    ExpectRefused(name, {Longs(kLeast), at::full({}, -1, at::kLong), "trunc"});
    ExpectRefused(name, {at::full({}, int64_t{1} << 31, at::kLong), least_of_32.sign(), "trunc"});
    ExpectTaken(name, {Longs(kLeast + 1), Longs(-1), "trunc"});
    ExpectTaken(name, {Longs(kLeast), Longs(-2), "trunc"});
    ExpectTaken(name, {Longs(int64_t{1} << 31), Longs(-1), "trunc"});
    ExpectTaken(name, {at::ones({2}), Longs(-1), "trunc"});
    ExpectTaken(name, {at::zeros({0}, at::kLong), Longs(-1), "trunc"});
    ExpectTaken(name, {at::ones({2}, at::kByte), at::ones({2}, at::kBool), "trunc"});
  }
  ExpectRefused("aten::div.Scalar_mode", {Longs(kLeast), -1, "floor"});
  ExpectRefused("aten::remainder.Scalar_Tensor", {kLeast, Longs(-1)});
  ExpectRefused("aten::floor_divide", {Longs(kLeast).to_sparse(), Longs(-1)});
  ExpectRefused("aten::lcm", {Longs(kLeast), Longs(7)});
  ExpectRefused("aten::lcm_", {Longs(7), Longs(kLeast)});
  ExpectTaken("aten::lcm", {Longs(kMost), Longs(-1)});
  ExpectTaken("aten::mul.Tensor", {Longs(kLeast), Longs(-1)});
  ExpectRefused("aten::arange.start_step", {0, kLeast, -1});
  ExpectRefused("aten::arange.start_step", {0, static_cast<double>(kLeast), -1});
  ExpectRefused("aten::arange", {std::nan("")});
  ExpectTaken("aten::arange.start_step", {0, -1000, -1});
  // A step of half is none between integers, and libtorch divides by it.
  const auto kLong = static_cast<int64_t>(at::kLong), kFloat = static_cast<int64_t>(at::kFloat);
  ExpectRefused("aten::arange.start_step", {0, 1, 0.5, kLong});
  ExpectRefused("aten::arange.start_out", {0, 1, 0.5, Longs(1)});
  ExpectTaken("aten::arange.start_step", {0, 1, 0.5, kFloat});
  ExpectTaken("aten::arange.start_step", {0, 1, 0.5});
  ExpectTaken("aten::arange.start_step", {0, 4, 2.0, kLong});
}

TEST(NumberCheckTest, IntegersThatCountSomethingAreNotBeyondAll) {
  const at::Tensor x = at::ones({1, 4, 4, 4});
  ExpectRefused("aten::pixel_shuffle", {x, int64_t{1} << 32});
  ExpectTaken("aten::pixel_shuffle", {x, 2});
  ExpectRefused("aten::col2im", {x, Ints{4, 4}, Ints{int64_t{1} << 32, int64_t{1} << 32}});
  ExpectRefused("aten::col2im", {x, Ints{4, 4}, Ints{1 << 13, -(1 << 13)}});
  ExpectTaken("aten::col2im", {x, Ints{4, 4}, Ints{1 << 12, 1 << 12}, 1, 1, 1});
  ExpectRefused("aten::im2col", {x, Ints{1, 1}, Ints{1, 1}, Ints{int64_t{1} << 32, 0}, Ints{1, 1}});
  ExpectRefused("aten::tril", {x, kMost});
  ExpectRefused("aten::tril", {x, kLeast});
  ExpectTaken("aten::tril", {x, int64_t{1} << 40});
  ExpectTaken("aten::slice.Tensor", {x, 0, c10::IValue(), kMost});
  ExpectRefused("aten::slice.Tensor", {x, kMost});
  ExpectTaken("aten::randint.low", {kLeast, kMost, Ints{2}});
  ExpectRefused("aten::randint.low", {0, 1, Ints{kMost}});
  // What is a scalar may be any.
  ExpectTaken("aten::add.Scalar", {x, kLeast});
  ExpectTaken("aten::as_strided", {x, Ints{1}, Ints{int64_t{1} << 33}});
  // Nothing is there, of any size.
  ExpectRefused("aten::neg", {at::zeros({0, int64_t{1} << 39})});
  ExpectRefused("aten::cat", {std::vector<at::Tensor>{at::zeros({1 << 20, 0, 1 << 20})}});
  ExpectTaken("aten::neg", {at::zeros({int64_t{1} << 30, 0})});
}

TEST(NumberCheckTest, NoResultHasASizeBelowNone) {
  const at::Tensor x = at::ones({1});
  // libtorch looks no further than at the dimension without elements.
  const at::Tensor odd = at::as_strided(x, Ints{0, -1}, Ints{1, 1});
  EXPECT_EQ(CheckSizes(Values{x, odd}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckSizes(Values{std::vector<at::Tensor>{x, odd}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckSizes(Values{x, at::zeros({0}), at::Tensor(), 1, c10::IValue()}),
            absl::OkStatus());
}

TEST(NumberCheckTest, AWindowOfAMaximumHasAPlaceInside) {
  for (const char* const name :
       {"aten::max_pool2d", "aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices.out"}) {
    const at::Tensor x = at::ones({1, 1, 8});
    ExpectRefused(name, {x, Ints{2, 1}, Ints{1, 1}, Ints{1, 0}, Ints{2, 1}});
    ExpectRefused(name, {x, 2, 1, 1, 2});
    ExpectTaken(name, {x, Ints{2, 2}, Ints{1, 1}, Ints{0, 1}, Ints{2, 8}});
    ExpectTaken(name, {x, Ints{2, 2}, Ints{1, 1}, Ints{1, 1}});
    ExpectRefused(name, {at::ones({1, 1, 1, 8}), Ints{2, 2}, 1, Ints{0, 1}, Ints{1, 9}});
  }
  ExpectRefused("aten::max_pool1d", {at::ones({1, 1, 3}), 3, 1, 1, 4});
  ExpectTaken("aten::max_pool1d", {at::ones({1, 1, 3}), 3, 1, 1, 3});
  ExpectRefused("aten::max_pool3d",
                {at::ones({1, 1, 3, 3, 3}), 3, 1, Ints{0, 0, 1}, Ints{1, 1, 4}});
  ExpectTaken("aten::max_pool3d", {at::ones({1, 1, 3, 3, 3}), 3, 1, Ints{0, 1, 1}, Ints{4, 3, 3}});
  ExpectTaken("aten::max_pool2d", {at::ones({1}), 2, 1, 1, 2});  // libtorch refuses that
}

TEST(NumberCheckTest, AWindowOfAMaximumEndsWhere32BitsReach) {
  const at::Tensor x = at::ones({1, 1, 10, 10});
  constexpr int64_t kAlmost = (int64_t{1} << 31) - 1;
  ExpectRefused("aten::max_pool2d", {x, Ints{3, 3}, Ints{1, 1}, Ints{0, 0}, Ints{kAlmost, 1}});
  ExpectRefused("aten::max_pool2d", {x, Ints{1, 1 << 20}, 1, 0, Ints{1, 1 << 20}});
  ExpectTaken("aten::max_pool2d", {x, Ints{1, 1 << 10}, 1, 0, Ints{1, 1 << 20}});
}

TEST(NumberCheckTest, AConvolutionTakesStepsOfItsOwn) {
  const at::Tensor x = at::ones({2, 4, 10}), w = at::ones({4, 4, 3}), none;
  ExpectRefused("aten::conv1d", {x, w, none, 1025});
  ExpectTaken("aten::conv1d", {x, w, none, 1024});
  ExpectRefused("aten::conv1d.padding", {x, w, none, Ints{1025}, "valid"});
  ExpectRefused("aten::conv_transpose1d", {x, w, none, 1 << 14});
  ExpectRefused("aten::conv2d", {x, w, none, Ints{1, 1 << 14}});
  ExpectRefused("aten::convolution", {x, w, none, 1 << 14, 0, 1, true, 8, 1});
  ExpectTaken("aten::conv1d", {x, w, none, 1, 1025, 1025});
}

TEST(NumberCheckTest, ThreeDimensionsAreNotReflected) {
  const at::Tensor x = at::ones({1, 4, 4, 4, 4});
  ExpectRefused("aten::pad", {x, Ints{1, 1, 1, 1, 1, 1}, "reflect"});
  ExpectTaken("aten::pad", {x, Ints{1, 1, 1, 1, 1, 1}, "replicate"});
  ExpectTaken("aten::pad", {x[0], Ints{1, 1, 1, 1}, "reflect"});
}

TEST(NumberCheckTest, AveragesOfIntegersAreNotPooled) {
  ExpectRefused("aten::avg_pool2d", {Longs(1).view({1, 1, 2}), Ints{1, 1}});
  ExpectRefused("aten::avg_pool3d_backward.grad_input", {Longs(1)});
  ExpectTaken("aten::avg_pool2d", {at::ones({1, 1, 2}), Ints{1, 1}});
}

TEST(NumberCheckTest, AScaleIsNeitherTinyNorHuge) {
  const at::Tensor x = at::ones({1, 1, 1});
  for (const double scale : {1e-30, 1e30, 0.0, -1.0, std::nan("")}) {
    SCOPED_TRACE(absl::StrCat(scale));
    ExpectRefused("aten::upsample_nearest1d", {x, Ints{3}, scale});
    ExpectRefused("aten::upsample_nearest2d.vec",
                  {x, c10::IValue(), std::vector<double>{1.0, scale}});
  }
  ExpectRefused("aten::upsample_nearest1d", {x, Ints{3}, 0});
  ExpectTaken("aten::upsample_nearest1d", {x, Ints{3}, c10::IValue()});
  ExpectTaken("aten::upsample_nearest1d", {x, Ints{3}, 3});
  ExpectTaken("aten::upsample_bilinear2d", {x, Ints{3, 3}, false, 3.0, 1e-6});
}

}  // namespace
}  // namespace distgrad
