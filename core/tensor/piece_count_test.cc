// What is counted of arguments, for the processor and for an accelerator, and which views may be
// written to.
#include "core/tensor/piece_count.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/operator_policy.h"

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

c10::OperatorHandle Op(absl::string_view name) { return FindOperator(name).value(); }

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
      {"aten::multinomial", {2, false}},
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
      return CountListBytes(Op(name), arguments);
    };
    EXPECT_GT(count(View({1000})), 15000) << name;
    EXPECT_EQ(count(OnGpu({1000})), 0) << name;
    EXPECT_EQ(count(at::Tensor()), 0) << name;
    EXPECT_EQ(count(at::ones({})), 0) << name;
    EXPECT_EQ(count(View({int64_t{1} << 60})), std::numeric_limits<int64_t>::max()) << name;
  }
  // No such dimension, and none at all.
  EXPECT_EQ(CountListBytes(Op("aten::unique_dim"), Values{View({1000}), 1}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::unique_dim"), Values{View({1000})}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::unique_consecutive"), Values{View({1000}), false, false}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::unique_consecutive"),
                           Values{View({1000}), false, false, c10::IValue()}),
            0);
}

// A length with a large prime factor takes other transforms on its way; those that have none do
// not.
TEST(PieceCountTest, TransformsOfOddLengthsCount) {
  constexpr int64_t kPrime = 524287;
  const at::Tensor view = View({kPrime + 1, 1});
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft"), Values{view}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::fft_irfft"), Values{view, c10::IValue(), 0}),
            2 * kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft"), Values{view, kPrime}), kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft2"), Values{view, std::vector<int64_t>{kPrime, 2}}),
            kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft"), Values{OnGpu({kPrime})}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft"), Values{at::Tensor()}), 0);
}

// Of a batch no more than what is transformed counts: the dimensions that are named, or else the
// last one, two or all, or as many as there are lengths.
TEST(PieceCountTest, TransformsCountOfTheirDimensionsAlone) {
  constexpr int64_t kPrime = 524287, kOther = 65537;
  constexpr int64_t kOfPrime = kPrime * 128, kOfOther = kOther * 128;
  using Numbers = std::vector<int64_t>;
  const c10::IValue none;
  const at::Tensor tensor = View({kPrime, 4, kOther, 2});
  const auto count = [&](const std::string& name, Values rest) {
    rest.insert(rest.begin(), tensor);
    return CountListBytes(Op(absl::StrCat("aten::fft_", name)), rest);
  };
  for (const std::string name : {"fft", "ifft", "rfft", "ihfft"}) {
    EXPECT_EQ(count(name, {}), 0) << name;
    EXPECT_EQ(count(name, {none, -2}), kOfOther) << name;
    EXPECT_EQ(count(name, {none, 0}), kOfPrime) << name;
    EXPECT_EQ(count(name, {none, false}), kOfPrime) << name;
    EXPECT_EQ(count(name, {1024, 0}), 0) << name;
    EXPECT_EQ(count(name, {kPrime}), kOfPrime) << name;
    EXPECT_EQ(count(name, {none, 4}), 0) << name << ", which has no such dimension";
  }
  EXPECT_EQ(count("fft2", {}), kOfOther);
  EXPECT_EQ(count("fft2", {none, Numbers{0, 1}}), kOfPrime);
  EXPECT_EQ(count("fft2", {Numbers{-1, 2}}), kOfOther) << "-1 stands for the size";
  EXPECT_EQ(count("fft2", {Numbers{1024, 2}}), 0);
  EXPECT_EQ(count("rfftn", {}), kOfPrime);
  EXPECT_EQ(count("rfftn", {none, Numbers{1, 2}}), kOfOther);
  EXPECT_EQ(count("rfftn", {Numbers{-1, 2}}), kOfOther);
  EXPECT_EQ(count("rfftn", {Numbers{4}, Numbers{0}}), 0);
  // Only the last of them has a half that is left out.
  EXPECT_EQ(count("irfftn", {none, Numbers{2, 1}}), kOfOther);
  EXPECT_EQ(count("irfftn", {none, Numbers{1, 2}}), 0) << "of a power of two";
  EXPECT_EQ(count("hfft2", {none, Numbers{1, 0}}), 2 * (kPrime - 1) * 128);
  EXPECT_EQ(CountListBytes(Op("aten::fft_irfft"), Values{View({(int64_t{1} << 62) + 1})}),
            std::numeric_limits<int64_t>::max());
  for (const std::string name : {"fftshift", "ifftshift"}) {
    EXPECT_EQ(count(name, {}), 0) << "it transforms nothing";
    EXPECT_EQ(count(name, {Numbers{0}}), 0) << "it transforms nothing";
  }
}

// `stft` and its inverse transform frames of the length that is their second argument; how long the
// signal is does not matter. And of a batch no more than what is transformed counts.
TEST(PieceCountTest, TransformsOfFramesCountToo) {
  constexpr int64_t kPrime = 524287;
  const at::Tensor signal = View({2 * kPrime});
  EXPECT_EQ(CountListBytes(Op("aten::stft"), Values{signal, kPrime}), kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::istft"), Values{View({kPrime / 2 + 1, 3}), kPrime}),
            kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::stft.center"), Values{signal, kPrime}), kPrime * 128);
  EXPECT_EQ(CountListBytes(Op("aten::stft"), Values{signal, 1024}), 0);
  EXPECT_EQ(CountListBytes(Op("aten::fft_fft"), Values{View({kPrime, 16})}), 0);
}

// One for each step, as a tensor of the sizes of batches says.
TEST(PieceCountTest, StepsOfPackedDataCount) {
  const at::Tensor few = at::zeros({1, 1, 1});
  EXPECT_EQ(CountPieces(Op("aten::rnn_tanh.data"), Values{few, at::ones({101}, at::kLong), few}),
            101);
}

// A product of two makes lists of as many columns as there are, and so do others: no element of a
// sparse tensor says how many these are.
TEST(PieceCountTest, TheSizesOfSparseTensorsCount) {
  const auto sparse = [](int64_t rows, int64_t columns) {
    return at::sparse_coo_tensor(at::zeros({2, 1}, at::kLong), at::ones({1}), {rows, columns});
  };
  constexpr int64_t kWide = int64_t{1} << 40;
  EXPECT_EQ(CountListBytes(Op("aten::mm"), Values{sparse(1, 1), sparse(1, kWide)}), kWide * 32);
  EXPECT_EQ(CountListBytes(Op("aten::mm"), Values{sparse(kWide, 1), sparse(1, 1)}), kWide * 32);
  EXPECT_EQ(CountListBytes(Op("aten::to_sparse_bsr"), Values{sparse(1, kWide), 1}), kWide * 32);
  EXPECT_EQ(CountListBytes(Op("aten::chain_matmul"),
                           Values{std::vector<at::Tensor>{sparse(1, 1), sparse(1, kWide)}}),
            kWide * 32);
  EXPECT_EQ(CountListBytes(Op("aten::mm"), Values{at::ones({1, 1}), View({1, kWide})}), 0);
  // A list for each line of a dimension, as many as there are places in the others.
  const at::Tensor block = at::sparse_coo_tensor(at::zeros({3, 1}, at::kLong), at::ones({1, 1000}),
                                                 {3000, 2, 2000, 1000});
  for (const char* const name :
       {"aten::softmax.int", "aten::log_softmax.int", "aten::special_log_softmax",
        "aten::special_softmax", "aten::cross_entropy_loss"}) {
    EXPECT_EQ(CountListBytes(Op(name), Values{block, 2}), 3000 * 2000 * 72) << name;
    EXPECT_EQ(CountListBytes(Op(name), Values{sparse(1, kWide), 1}), kWide * 72) << name;
  }
  EXPECT_EQ(CountListBytes(Op("aten::neg"), Values{block}), 3000 * 32);
  // One that is small does not hide what else there is.
  std::vector<at::Tensor> many(1000, at::ones({1}));
  many.push_back(sparse(1, 1));
  EXPECT_GT(CountListBytes(Op("aten::meshgrid"), Values{many}), 1000 * 1000);
}

// Of one byte for each element, say, it makes eight.
TEST(PieceCountTest, ListsOfMediansCount) {
  const at::Tensor bytes = at::ones({1000, 3}, at::kByte);
  for (const std::string name : {"median", "nanmedian"}) {
    const auto count = [&](const Values& args) {
      return CountListBytes(Op(absl::StrCat("aten::", name, args.size() > 1 ? ".dim" : "")), args);
    };
    EXPECT_GE(count(Values{bytes, 0}), 1000 * 8) << name;
    EXPECT_LT(count(Values{bytes, 1}), 1000) << name;
    EXPECT_EQ(count(Values{bytes}), 0) << name;
  }
}

// Its error has a tensor with more than one dimension as a text.
TEST(PieceCountTest, WhatMeshgridRefusesCountsAsText) {
  const auto count = [](const at::Tensor& tensor) {
    return CountListBytes(Op("aten::meshgrid"), Values{std::vector<at::Tensor>{tensor}});
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

// A list of sizes or the like is no longer than twice the dimensions of a tensor; one of other
// numbers may have one for each tensor.
TEST(PieceCountTest, ListsThatAreNotOfSizesMayBeLonger) {
  c10::impl::GenericList numbers(c10::NumberType::get());
  for (int64_t i = 0; i < 200; ++i) numbers.push_back(i);
  EXPECT_EQ(CheckListLengths(Op("aten::_foreach_mul.ScalarList"),
                             Values{std::vector<at::Tensor>(200, at::ones({1})), numbers}),
            absl::OkStatus());
  EXPECT_EQ(
      CheckListLengths(Op("aten::repeat"), Values{at::ones({1}), std::vector<int64_t>(200, 1)})
          .code(),
      absl::StatusCode::kInvalidArgument);
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
      if (CheckViews(Op(name), values, CountShown(values)).ok()) {
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
