// What is counted of arguments, for the processor and for an accelerator, and which views may be
// written to.
#include "core/tensor/piece_count.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/tensor/operator_policy.h"

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

at::Tensor View(std::vector<int64_t> sizes) { return at::ones({1}).expand(sizes); }

// What says that it is on a GPU, and has no memory anywhere.
at::Tensor OnGpu(std::vector<int64_t> sizes) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<float>(),
      c10::Device(c10::kCUDA, 0));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

TEST(PieceCountTest, ListsAreOfTheProcessorAlone) {
  const std::vector<std::pair<std::string, Values>> calls = {
      {"aten::topk", {1}},
      {"aten::mode", {}},
      {"aten::unique_dim", {0}},
      {"aten::unique_dim.out", {-1}},
      {"aten::unique_dim_consecutive", {0}},
      {"aten::unique_consecutive", {false, false, 0}},
  };
  for (const auto& [name, rest] : calls) {
    const auto count = [&, &name = name, &rest = rest](const at::Tensor& tensor) {
      Values arguments = {tensor};
      arguments.insert(arguments.end(), rest.begin(), rest.end());
      return CountListBytes(name, arguments);
    };
    EXPECT_GT(count(View({1000})), 15000) << name;
    EXPECT_EQ(count(OnGpu({1000})), 0) << name;
    EXPECT_EQ(count(at::Tensor()), 0) << name;
    EXPECT_EQ(count(at::ones({})), 0) << name;
    EXPECT_EQ(count(View({int64_t{1} << 60})), std::numeric_limits<int64_t>::max()) << name;
  }
  // No such dimension, and none at all.
  EXPECT_EQ(CountListBytes("aten::unique_dim", Values{View({1000}), 1}), 0);
  EXPECT_EQ(CountListBytes("aten::unique_dim", Values{View({1000})}), 0);
  EXPECT_EQ(CountListBytes("aten::unique_consecutive", Values{View({1000}), false, false}), 0);
  EXPECT_EQ(
      CountListBytes("aten::unique_consecutive", Values{View({1000}), false, false, c10::IValue()}),
      0);
}

// A length with a large prime factor takes other transforms on its way; those that have none do
// not.
TEST(PieceCountTest, TransformsOfOddLengthsCount) {
  constexpr int64_t kPrime = 524287;
  const at::Tensor view = View({kPrime + 1, 1});
  EXPECT_EQ(CountListBytes("aten::fft_fft", Values{view}), 0);
  EXPECT_EQ(CountListBytes("aten::fft_irfft", Values{view}), 2 * kPrime * 128);
  EXPECT_EQ(CountListBytes("aten::fft_fft", Values{view, kPrime}), kPrime * 128);
  EXPECT_EQ(CountListBytes("aten::fft_fft2", Values{view, std::vector<int64_t>{kPrime, 2}}),
            kPrime * 128);
  EXPECT_EQ(CountListBytes("aten::fft_fft", Values{OnGpu({kPrime})}), 0);
  EXPECT_EQ(CountListBytes("aten::fft_fft", Values{at::Tensor()}), 0);
}

// Its error has a tensor with more than one dimension as a text.
TEST(PieceCountTest, WhatMeshgridRefusesCountsAsText) {
  const auto count = [](const at::Tensor& tensor) {
    return CountListBytes("aten::meshgrid", Values{std::vector<at::Tensor>{tensor}});
  };
  EXPECT_EQ(count(View({1000, 2})), 2000 * 128);
  EXPECT_LT(count(View({1000})), 1000);
}

TEST(PieceCountTest, WhatIsShownIsCountedInListsAndOutOfThem) {
  const at::Tensor two = at::ones({2});
  const ShownTensors none =
      CountShown(Values{1, c10::IValue(), at::Tensor(), std::vector<int64_t>{1}});
  EXPECT_EQ(none.bytes, 0u);
  EXPECT_TRUE(none.repeating.empty());
  const ShownTensors some =
      CountShown(Values{two, View({3}), std::vector<at::Tensor>{two, View({5})},
                        std::vector<at::Tensor>{View({7}), View({11})}, two});
  EXPECT_EQ(some.bytes, 4u * (2 + 3 + 2 + 5 + 7 + 11 + 2));
  EXPECT_EQ(some.repeating, (absl::InlinedVector<size_t, 4>{1, 2, 3}));
  const int64_t large = int64_t{1} << 61;
  EXPECT_EQ(CountShown(Values{View({large}), View({large}), two}).bytes,
            std::numeric_limits<uint64_t>::max());
}

// Of all that is said to be written to, what others may write to though it is a view in which one
// element stands for many: they change sizes and strides.
TEST(PieceCountTest, WhatMayBeDoneInPlaceToAViewIsKnown) {
  std::set<std::string> allowed;
  size_t refused = 0;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto found = c10::Dispatcher::singleton().findSchema(op);
    const std::string name =
        op.overload_name.empty() ? op.name : absl::StrCat(op.name, ".", op.overload_name);
    if (!found.has_value() || !CheckSafe(name).ok()) continue;
    const std::vector<c10::Argument>& arguments = found->schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].alias_info() == nullptr || !arguments[i].alias_info()->isWrite()) continue;
      Values values(i + 1);
      values[i] = View({2, 3});
      if (CheckViews(name, values, CountShown(values)).ok()) {
        allowed.insert(name);
      } else {
        ++refused;
      }
    }
  }
  EXPECT_EQ(allowed,
            (std::set<std::string>{"aten::as_strided_", "aten::detach_", "aten::rename_",
                                   "aten::squeeze_", "aten::squeeze_.dim", "aten::squeeze_.dimname",
                                   "aten::squeeze_.dims", "aten::swapaxes_", "aten::swapdims_",
                                   "aten::t_", "aten::transpose_", "aten::unsqueeze_"}));
  EXPECT_GT(refused, 1000u);
}

}  // namespace
}  // namespace distgrad
