// Which tensors can be loaded together, for all ways in which two may share memory.
#include "core/checkpoint/shared_memory.h"

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "core/checkpoint/row_major.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Names = std::vector<std::string>;
using Tensors = std::map<std::string, at::Tensor>;

class SharedMemoryTest : public testing::Test {
 protected:
  // Which of the tensors cannot have their values together with those before.
  Names Conflicts(const Tensors& tensors, const Tensors& values) {
    sums_ = reads_ = 0;
    const auto conflicts = FindConflicts(
        tensors,
        [&](const std::string& name) {
          ++sums_;
          return RowMajorChecksum(values.at(name));
        },
        [&](const std::string& name) {
          ++reads_;
          return values.at(name).resolve_conj().contiguous();
        });
    EXPECT_TRUE(conflicts.ok()) << conflicts.status();
    Names names;
    for (const auto& [name, why] : *conflicts) {
      EXPECT_TRUE(absl::StrContains(why, "for which other values were saved")) << why;
      names.push_back(name);
    }
    return names;
  }

  int sums_ = 0, reads_ = 0;  // of the last time
};

TEST_F(SharedMemoryTest, PiecesOfOneBufferShareNothing) {
  const at::Tensor flat = at::zeros({12});
  EXPECT_EQ(Conflicts({{"a", flat.narrow(0, 0, 4)},
                       {"b", flat.narrow(0, 4, 8).view({2, 4}).t()},
                       {"none", flat.narrow(0, 2, 0)},
                       {"nothing", at::Tensor()}},
                      {}),
            Names());
  EXPECT_EQ(sums_ + reads_, 0) << "nothing is read for that";
}

TEST_F(SharedMemoryTest, TheSameMemoryHasOneValue) {
  const at::Tensor tied = at::zeros({2, 3}), one = at::ones({2, 3});
  const Tensors tensors = {{"embed", tied}, {"head", tied.detach()}, {"tail", tied.view({2, 3})}};
  EXPECT_EQ(Conflicts(tensors, {{"embed", one}, {"head", one}, {"tail", one}}), Names());
  EXPECT_EQ(reads_, 0) << "checksums say it";
  EXPECT_EQ(Conflicts(tensors, {{"embed", one}, {"head", one * 2}, {"tail", one}}), Names{"head"});
  EXPECT_EQ(reads_, 0) << "checksums say it";
}

// As where a library and a program each make a tensor of one buffer.
TEST_F(SharedMemoryTest, OneBufferMayHaveSeveralStorages) {
  std::vector<float> buffer(6);
  const at::Tensor a = at::from_blob(buffer.data(), {6}), b = at::from_blob(buffer.data(), {6}),
                   rows = at::from_blob(buffer.data(), {2, 3});
  const at::Tensor values = at::arange(6, at::kFloat);
  EXPECT_EQ(Conflicts({{"a", a}, {"b", b}}, {{"a", values}, {"b", values + 1}}), Names{"b"});
  EXPECT_EQ(Conflicts({{"a", a}, {"rows", rows}}, {{"a", values}, {"rows", values.view({2, 3})}}),
            Names());
  EXPECT_EQ(
      Conflicts({{"a", a}, {"rows", rows}}, {{"a", values}, {"rows", values.view({2, 3}) + 1}}),
      Names{"rows"});
}

TEST_F(SharedMemoryTest, ThoseThatOverlapMayHaveTheSameValues) {
  const at::Tensor whole = at::zeros({4, 3}), values = at::arange(12, at::kFloat).view({4, 3});
  const Tensors tensors = {
      {"columns", whole.t()}, {"half", whole.narrow(0, 0, 2)}, {"row", whole[1]}, {"whole", whole}};
  Tensors good = {{"columns", values.t()},
                  {"half", values.narrow(0, 0, 2)},
                  {"row", values[1]},
                  {"whole", values}};
  EXPECT_EQ(Conflicts(tensors, good), Names());
  // Those that come before have theirs.
  good["row"] = values[2];
  EXPECT_EQ(Conflicts(tensors, good), Names{"row"});
  good["columns"] = values.t() + 1;
  EXPECT_EQ(Conflicts(tensors, good), (Names{"half", "row", "whole"}));
}

// Their elements alternate.
TEST_F(SharedMemoryTest, ColumnsShareNothing) {
  const at::Tensor whole = at::zeros({3, 2});
  EXPECT_EQ(Conflicts({{"first", whole.select(1, 0)}, {"second", whole.select(1, 1)}},
                      {{"first", at::ones({3})}, {"second", at::zeros({3})}}),
            Names());
  EXPECT_EQ(reads_, 0) << "where they are says it";
}

// Of one that is left out its other names are, too.
TEST_F(SharedMemoryTest, AnotherNameOfAConflictIsOne) {
  const at::Tensor whole = at::zeros({4}), row = whole.narrow(0, 1, 2);
  EXPECT_EQ(Conflicts({{"a", whole}, {"b", row}, {"c", row}},
                      {{"a", at::zeros({4})}, {"b", at::ones({2})}, {"c", at::ones({2})}}),
            (Names{"b", "c"}));
}

// Those that differ from the one before may fit where that does not.
TEST_F(SharedMemoryTest, AnotherValueOfAConflictIsTried) {
  const at::Tensor whole = at::zeros({6}), end = whole.narrow(0, 3, 3);
  const at::Tensor bad = at::ones({3}), good = at::tensor({0.0F, 5.0F, 5.0F});
  EXPECT_EQ(
      Conflicts({{"a", whole.narrow(0, 0, 4)}, {"b", end}, {"c", end}, {"d", end}, {"e", end}},
                {{"a", at::zeros({4})}, {"b", bad}, {"c", good}, {"d", bad}, {"e", good}}),
      (Names{"b", "d"}));
}

TEST_F(SharedMemoryTest, BytesCountWhateverTheDtype) {
  const at::Tensor whole = at::zeros({2}, at::kComplexFloat);
  const at::Tensor values = at::tensor(std::vector<c10::complex<float>>{{1, 2}, {3, -4}});
  const Tensors tensors = {{"a", whole},
                           {"conjugate", whole.conj()},
                           {"imaginary", at::imag(whole.conj())},
                           {"real", at::view_as_real(whole)}};
  Tensors good = {{"a", values},
                  {"conjugate", values.conj()},
                  {"imaginary", at::imag(values.conj()).resolve_neg()},
                  {"real", at::view_as_real(values)}};
  EXPECT_EQ(Conflicts(tensors, good), Names());
  good["conjugate"] = values;
  good["imaginary"] = at::imag(values);
  EXPECT_EQ(Conflicts(tensors, good), (Names{"conjugate", "imaginary"}));
}

TEST(MayOverlapItselfTest, ElementsOfViewsAreDistinct) {
  const at::Tensor whole = at::zeros({4, 6});
  for (const at::Tensor& tensor :
       {whole, whole.t(), whole.narrow(1, 1, 2), whole.slice(0, 0, 4, 2).slice(1, 1, 6, 3).t(),
        whole.select(1, 2), whole.narrow(0, 1, 1).expand({1, 6}), at::zeros({}), at::zeros({0, 3}),
        at::zeros({1}).expand({0}), whole.view({-1}).unfold(0, 3, 3)}) {
    EXPECT_FALSE(MayOverlapItself(tensor)) << tensor.sizes() << tensor.strides();
  }
  for (const at::Tensor& tensor :
       {at::zeros({1}).expand({2}), whole.select(1, 0).unsqueeze(0).expand({2, 4}),
        at::zeros({3}).unfold(0, 2, 1), whole.view({-1}).unfold(0, 4, 3)}) {
    EXPECT_TRUE(MayOverlapItself(tensor)) << tensor.sizes() << tensor.strides();
  }
}

// What lies between two elements may be more than there is memory for.
TEST_F(SharedMemoryTest, WithoutMemoryItSaysOfWhich) {
  constexpr int64_t kFar = int64_t{1} << 58;
  float buffer[2] = {};
  const at::Tensor a = at::from_blob(buffer, {2}, {kFar}), b = at::from_blob(buffer + 1, {2});
  const auto found = FindConflicts(
      {{"a", a}, {"b", b}}, [](const std::string&) { return 0; },
      [](const std::string&) { return at::zeros({2}); });
  EXPECT_FALSE(found.ok());
  EXPECT_TRUE(absl::StrContains(found.status().message(), "finding what shares memory with 'a'"))
      << found.status();
}

}  // namespace
}  // namespace distgrad
