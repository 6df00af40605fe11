// The list of operators that are served: each is there, and safe, and what is known to be bad is
// not.
#include "core/tensor/operator_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/served_operators.h"

namespace distgrad {
namespace {

absl::Status CheckServedByName(const char* name) { return CheckServed(FindOperator(name).value()); }

TEST(ServedOperatorsTest, EachIsSortedOnceAndServed) {
  // In one of its overloads at least; a name that libtorch does not have is in none.
  std::set<std::string> served;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (handle.has_value() && CheckServed(*handle).ok()) served.insert(op.name);
  }
  std::set<std::string> listed;
  for (const absl::Span<const absl::string_view> group : ServedOperators()) {
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end())) << "the group of " << group.front();
    for (const absl::string_view name : group) {
      const std::string full = absl::StrCat("aten::", name);
      EXPECT_TRUE(listed.insert(full).second) << full << " is there twice";
      EXPECT_EQ(served.count(full), 1u) << full << " is no operator of libtorch's, or not safe";
    }
  }
  EXPECT_GT(listed.size(), 300u);
  // What is not on the list itself does in place what something on it does.
  for (const std::string& name : served) {
    EXPECT_TRUE(listed.count(name) > 0 || listed.count(name.substr(0, name.size() - 1)) > 0)
        << name;
  }
}

// Of the overloads of what is listed none is, but for those that take the tensor of their result,
// and those that operator_policy.cc has by name.
TEST(ServedOperatorsTest, WhichOverloadsAreNot) {
  std::set<std::string> left_out;
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findSchema(op);
    if (!handle.has_value() || !IsListed(op.name) || CheckServed(*handle).ok()) continue;
    if (CheckSafe(NameOf(op)).ok()) {
      const auto& arguments = handle->schema().arguments();
      EXPECT_TRUE(std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& each) {
        return each.is_out();
      })) << op;
    } else {
      left_out.insert(NameOf(op));
    }
  }
  EXPECT_EQ(left_out, (std::set<std::string>{"aten::linalg_slogdet.out", "aten::log_sigmoid.out",
                                             "aten::repeat_interleave.Tensor",
                                             "aten::repeat_interleave.Tensor_out",
                                             "aten::repeat_interleave.self_Tensor"}));
}

TEST(ServedOperatorsTest, WhatTrainingNeedsIsServed) {
  for (const char* name :
       {"aten::add.Tensor", "aten::add_.Tensor", "aten::__and__.Tensor", "aten::__iand__.Tensor",
        "aten::mm", "aten::conv2d", "aten::conv2d.padding", "aten::scaled_dot_product_attention",
        "aten::layer_norm", "aten::cross_entropy_loss", "aten::embedding", "aten::index.Tensor",
        "aten::max_pool2d", "aten::max.dim", "aten::normal_", "aten::zero_", "aten::copy_",
        "aten::repeat_interleave.self_int"}) {
    EXPECT_EQ(CheckServedByName(name), absl::OkStatus()) << name;
  }
}

TEST(ServedOperatorsTest, WhatIsKnownToBeBadIsRefused) {
  for (const char* name :
       {// Unsafe.
        "aten::from_file", "aten::set_.source_Tensor", "aten::native_batch_norm", "aten::lstm.data",
        "aten::_sparse_coo_tensor_unsafe",
        // Not read, or read and left out: not known to be unsafe.
        "aten::add.out", "aten::max.dim_max", "aten::lcm", "aten::fft_fft", "aten::col2im",
        "aten::linalg_svd", "aten::linalg_multi_dot", "aten::as_strided", "aten::resize_",
        "aten::empty.memory_format", "aten::_foreach_neg", "aten::median.dim",
        "aten::convolution_backward", "aten::cov", "aten::histogramdd.int_bins"}) {
    EXPECT_EQ(CheckServedByName(name).code(), absl::StatusCode::kPermissionDenied) << name;
  }
  const absl::Status status = CheckServedByName("aten::fft_fft");
  EXPECT_TRUE(absl::StrContains(status.message(), "operator aten::fft_fft is not on the list"))
      << status;
  EXPECT_TRUE(CheckSafe("aten::fft_fft").ok());
  EXPECT_FALSE(IsListed("add"));
  EXPECT_FALSE(IsListed("prim::add"));
  EXPECT_FALSE(IsListed("aten::__add__"));
  EXPECT_FALSE(IsListed("aten::"));
}

}  // namespace
}  // namespace distgrad
