// Operators that are called by name: defaults, conversions, results and errors.
#include "core/tensor/operator.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

// The result of a call that must succeed.
Values Call(absl::string_view name, Values args) {
  absl::StatusOr<Values> results = CallOperator(name, std::move(args));
  EXPECT_TRUE(results.ok()) << results.status();
  return results.ok() ? *std::move(results) : Values(4);
}

absl::Status CallError(absl::string_view name, Values args) {
  return CallOperator(name, std::move(args)).status();
}

#define EXPECT_EQUAL(a, b) EXPECT_TRUE(at::equal((a), (b)))

TEST(CallOperator, DefaultsAreFilledIn) {
  at::Tensor a = at::rand({3}), b = at::rand({3});
  EXPECT_EQUAL(Call("aten::add.Tensor", {a, b})[0].toTensor(), at::add(a, b));
  EXPECT_EQUAL(Call("aten::add.Tensor", {a, b, 2})[0].toTensor(), at::add(a, b, 2));
  EXPECT_EQUAL(Call("aten::mm", {a.reshape({1, 3}), b.reshape({3, 1})})[0].toTensor(),
               at::mm(a.reshape({1, 3}), b.reshape({3, 1})));
}

TEST(CallOperator, SeveralResults) {
  at::Tensor a = at::rand({3, 4});
  Values results = Call("aten::max.dim", {a, 1});
  ASSERT_EQ(results.size(), 2);
  auto [values, indices] = at::max(a, 1);
  EXPECT_EQUAL(results[0].toTensor(), values);
  EXPECT_EQUAL(results[1].toTensor(), indices);
}

TEST(CallOperator, ResultsThatAreNotTensors) {
  EXPECT_TRUE(Call("aten::equal", {at::zeros({2}), at::zeros({2})})[0].toBool());
  EXPECT_EQ(Call("aten::split.Tensor", {at::zeros({5}), 2})[0].toTensorVector().size(), 3);
}

TEST(CallOperator, Lists) {
  at::Tensor a = at::rand({2, 3}), b = at::rand({1, 3});
  EXPECT_EQUAL(Call("aten::cat", {std::vector<at::Tensor>{a, b}})[0].toTensor(), at::cat({a, b}));
  EXPECT_EQUAL(Call("aten::sum.dim_IntList", {a, std::vector<int64_t>{1}, true})[0].toTensor(),
               at::sum(a, {1}, true));
  EXPECT_EQUAL(Call("aten::sum.dim_IntList", {a, 1})[0].toTensor(), at::sum(a, {1}));
  EXPECT_EQUAL(Call("aten::sum.dim_IntList", {a, c10::IValue()})[0].toTensor(), at::sum(a));
  // A list of whatever, as a caller without types makes it.
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(a);
  list.push_back(b);
  EXPECT_EQUAL(Call("aten::cat", {list})[0].toTensor(), at::cat({a, b}));
  Values scaled = Call("aten::_foreach_mul.ScalarList",
                       {std::vector<at::Tensor>{a, b}, std::vector<int64_t>{2, 3}});
  EXPECT_EQUAL(scaled[0].toTensorVector()[1], at::mul(b, 3));
}

TEST(CallOperator, OneNumberFillsAListOfKnownLength) {
  at::Tensor image = at::rand({1, 1, 6, 6});
  EXPECT_EQUAL(Call("aten::max_pool2d", {image, 2})[0].toTensor(), at::max_pool2d(image, 2));
  EXPECT_EQUAL(Call("aten::max_pool2d", {image, 3, 1, true})[0].toTensor(),
               at::max_pool2d(image, 3, 1, 1));
  EXPECT_EQ(CallError("aten::reshape", {image, 36}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(CallOperator, ScalarsAndEnums) {
  Values full = Call("aten::full", {std::vector<int64_t>{2, 2}, 1.5, int64_t{7}});
  EXPECT_EQUAL(full[0].toTensor(), at::full({2, 2}, 1.5, at::kDouble));
  Values on_cpu =
      Call("aten::full", {std::vector<int64_t>{2}, 3, c10::IValue(), c10::IValue(), "cpu"});
  EXPECT_EQUAL(on_cpu[0].toTensor(), at::full({2}, 3, at::kLong));
  at::Tensor a = at::rand({4});
  EXPECT_EQUAL(Call("aten::where.self", {at::gt(a, 0.5), a, at::zeros({4})})[0].toTensor(),
               at::where(at::gt(a, 0.5), a, at::zeros({4})));
  EXPECT_EQUAL(Call("aten::leaky_relu", {a, 1})[0].toTensor(), at::leaky_relu(a, 1));
  EXPECT_EQUAL(Call("aten::dropout", {a, 0, true})[0].toTensor(), a);  // double p
  // A number for a tensor doesn't raise the dtype, as in Python.
  at::Tensor half = Call("aten::mul.Tensor", {a.to(at::kHalf), 2.0})[0].toTensor();
  EXPECT_EQ(half.scalar_type(), at::kHalf);
}

TEST(CallOperator, OptionalTensors) {
  at::Tensor a = at::rand({3, 4});
  at::Tensor rows = at::tensor({2, 0});
  c10::List<std::optional<at::Tensor>> indices;
  indices.push_back(std::nullopt);
  indices.push_back(rows);
  EXPECT_EQUAL(Call("aten::index.Tensor", {a, indices})[0].toTensor(), at::index(a, indices));
  EXPECT_EQUAL(
      Call("aten::index.Tensor", {a, std::vector<at::Tensor>{at::Tensor(), rows}})[0].toTensor(),
      at::index(a, indices));
  at::Tensor weight = at::rand({2, 4});
  for (const c10::IValue& bias : {c10::IValue(), c10::IValue(at::Tensor())}) {
    EXPECT_EQUAL(Call("aten::linear", {a, weight, bias})[0].toTensor(), at::linear(a, weight));
  }
}

TEST(CallOperator, AutogradRecords) {
  at::Tensor a = at::rand({3}).requires_grad_();
  at::Tensor loss = Call("aten::sum", {Call("aten::mul.Tensor", {a, a})[0]})[0].toTensor();
  ASSERT_NE(loss.grad_fn(), nullptr);
  loss.backward();
  EXPECT_EQUAL(a.grad(), at::mul(a.detach(), 2));
}

TEST(CallOperator, InPlaceAndOut) {
  at::Tensor a = at::zeros({3}), out = at::empty({0});
  EXPECT_TRUE(Call("aten::add_.Tensor", {a, at::ones({3})})[0].toTensor().is_same(a));
  EXPECT_EQUAL(a, at::ones({3}));
  Call("aten::mul.out", {a, a, out});
  EXPECT_EQUAL(out, a);
  EXPECT_EQ(CallError("aten::add_.Tensor", {1, a}).code(), absl::StatusCode::kInvalidArgument);
}

// The dispatcher would take the other for the same; a check that goes by names would not.
TEST(CallOperator, AnOperatorWithoutAnOverloadHasOneName) {
  EXPECT_TRUE(CallOperator("aten::neg", {at::ones({1})}).ok());
  EXPECT_EQ(CallError("aten::neg.", {at::ones({1})}).code(), absl::StatusCode::kNotFound);
}

TEST(CallOperator, UnknownNames) {
  auto message = [](absl::string_view name) {
    absl::Status status = CallError(name, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    return std::string(status.message());
  };
  EXPECT_TRUE(absl::StrContains(message("aten::add"), "there is "));
  EXPECT_TRUE(absl::StrContains(message("aten::add"), "aten::add.Tensor"));
  EXPECT_TRUE(absl::StrContains(message("aten::matmull"), "aten::matmul"));
  EXPECT_TRUE(absl::StrContains(message("mm"), "namespace"));
  EXPECT_LT(message("aten::" + std::string(100000, 'x')).size(), 300);
  for (const char* name : {"", "::", ".", "aten::", "aten::mm.", "a.b::c", "aten::mm.x"}) {
    if (absl::string_view(name) != "aten::mm.") message(name);  // the empty overload exists
  }
}

TEST(CallOperator, ArgumentsAreChecked) {
  at::Tensor a = at::rand({2, 2});
  auto message = [](absl::string_view name, Values args) {
    absl::Status status = CallError(name, std::move(args));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message("aten::mm", {a, "text"}),
            "aten::mm: argument 2 'mat2' must be Tensor, not str");
  EXPECT_EQ(message("aten::mm", {a}),
            "aten::mm: argument 2 'mat2' (Tensor) is missing and has no default");
  EXPECT_EQ(message("aten::mm", {a, a, a}), "aten::mm: takes 2 arguments at most, not 3");
  message("aten::softmax.int", {a, 1.5});
  message("aten::sum.dim_IntList", {a, std::vector<double>{1.0}});
  message("aten::max.dim", {a, 0, 1});
  message("aten::cat", {a});
  message("aten::cat", {std::vector<int64_t>{1}});
  message("aten::add.Tensor", {a, a, "text"});
  message("aten::mm", {c10::IValue(), a});
  for (int64_t dtype : {-1, 46, 5000}) {
    message("aten::full", {std::vector<int64_t>{2}, 1, dtype});
  }
  message("aten::contiguous", {a, 17});
  message("aten::empty.memory_format", {std::vector<int64_t>{2}, c10::IValue(), 99});
}

TEST(CallOperator, WhatTheOperatorThrows) {
  absl::Status shapes = CallError("aten::mm", {at::rand({2, 3}), at::rand({2, 3})});
  EXPECT_EQ(shapes.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StartsWith(shapes.message(), "aten::mm: ")) << shapes;
  EXPECT_FALSE(absl::StrContains(shapes.message(), "frame #")) << shapes;
  EXPECT_EQ(CallError("aten::select.int", {at::rand({2}), 0, 5}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CallError("aten::full",
                      {std::vector<int64_t>{2}, 1, c10::IValue(), c10::IValue(), "no such device"})
                .code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status singular = CallError("aten::linalg_inv", {at::zeros({2, 2})});
  EXPECT_EQ(singular.code(), absl::StatusCode::kInvalidArgument) << singular;
  const absl::Status missing = CallError("aten::sum", {at::zeros({2, 2}).to_sparse_csr()});
  EXPECT_NE(missing.code(), absl::StatusCode::kInternal) << missing;
}

// What an operator of the program's own throws, which has nothing to do with its arguments.
TEST(CallOperator, OtherFailuresAreInternal) {
  const auto library =
      torch::RegisterOperators()
          .op("operator_test::asserts() -> ()", [] { TORCH_INTERNAL_ASSERT(false, "a bug"); })
          .op("operator_test::throws() -> ()", [] { throw std::runtime_error("no disk"); })
          .op("operator_test::device() -> ()",
              [] {
                throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "a kernel failed");
              })
          .op("operator_test::checks() -> ()", [] { TORCH_CHECK(false, "an argument"); });
  EXPECT_EQ(CallError("operator_test::asserts", {}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(CallError("operator_test::throws", {}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(CallError("operator_test::device", {}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(CallError("operator_test::checks", {}),
            absl::InvalidArgumentError("operator_test::checks: an argument"));
}

TEST(CallOperator, NamesOfDimensionsAreRefused) {
  const at::Tensor a = at::rand({2, 2});
  const std::vector<std::string> rows = {"rows"};
  for (const auto& [name, args] : std::vector<std::pair<std::string, Values>>{
           {"aten::sum.dim_DimnameList", {a, rows}},
           {"aten::max.names_dim", {a, "dimname::rows"}},
           {"aten::rename", {a, rows}},
           {"aten::flatten.named_out_dim", {a, 0, 1, "all"}},
           {"aten::zeros.names", {std::vector<int64_t>{2}, rows}}}) {
    const absl::Status status = CallError(name, args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "names dimensions")) << status;
  }
  EXPECT_EQUAL(Call("aten::zeros.names", {std::vector<int64_t>{2}, c10::IValue()})[0].toTensor(),
               at::zeros({2}));
}

// Every string that an operator of libtorch takes is a word, or names dimensions, by the name of
// the argument: a new one has to be looked at.
TEST(CallOperator, AllStringsAreKnown) {
  const std::set<std::string> words = {"UPLO",
                                       "a",
                                       "activation",
                                       "algorithm",
                                       "api_name",
                                       "approximate",
                                       "assert_msg",
                                       "b",
                                       "driver",
                                       "equation",
                                       "filename",
                                       "indexing",
                                       "interpolation",
                                       "mode",
                                       "norm",
                                       "ord",
                                       "p",
                                       "pad_mode",
                                       "padding",
                                       "padding_side",
                                       "reduce",
                                       "rounding_mode",
                                       "s",
                                       "side"};
  const std::set<std::string> dimensions = {"dim",     "dim0",    "dim1",     "dim2",
                                            "dims",    "end_dim", "names",    "order",
                                            "out_dim", "outdim",  "start_dim"};
  std::set<std::string> others;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!absl::StartsWith(op.name, "aten::")) continue;
    const auto found = c10::Dispatcher::singleton().findSchema(op);
    if (!found.has_value()) continue;
    for (const c10::Argument& argument : found->schema().arguments()) {
      if (absl::StartsWith(argument.type()->str(), "str") && words.count(argument.name()) == 0 &&
          dimensions.count(argument.name()) == 0) {
        others.insert(op.name + " " + argument.name());
      }
    }
  }
  EXPECT_EQ(others, std::set<std::string>{});
}

TEST(CallOperator, OutOfMemory) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer ends the process instead of failing the allocation";
#endif
  EXPECT_EQ(CallError("aten::empty.memory_format", {std::vector<int64_t>{int64_t{1} << 50}}).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace distgrad
