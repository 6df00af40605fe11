// Arguments and results as messages and back, cut short and at random.
#include "core/tensor/values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/List.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/base/wire.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using Values = std::vector<c10::IValue>;

Values Sample() {
  c10::List<std::optional<at::Tensor>> optional;
  optional.push_back(std::nullopt);
  optional.push_back(at::ones({2}));
  optional.push_back(at::Tensor());
  return {c10::IValue(),
          true,
          false,
          int64_t{-5},
          INT64_MIN,
          1.25,
          c10::complex<double>(1, -2),
          std::string("a\0b", 3),
          "",
          at::Device("cpu"),
          at::Device("cuda:3"),
          at::Device("cuda"),
          at::arange(3),
          at::Tensor(),
          std::vector<int64_t>{1, -2, 3},
          std::vector<int64_t>{},
          std::vector<double>{0.5, -0.0},
          c10::List<bool>({true, false, true}),
          std::vector<at::Tensor>{at::zeros({1}), at::Tensor(), at::ones({2, 2})},
          std::vector<at::Tensor>{},
          optional};
}

void ExpectSameTensor(const at::Tensor& a, const at::Tensor& b) {
  ASSERT_EQ(a.defined(), b.defined());
  EXPECT_TRUE(!a.defined() || at::equal(a, b));
}

void ExpectSame(const c10::IValue& a, const c10::IValue& b) {
  ASSERT_EQ(a.tagKind(), b.tagKind());
  if (a.isTensor()) {
    ExpectSameTensor(a.toTensor(), b.toTensor());
  } else if (a.isList()) {
    EXPECT_EQ(*a.type(), *b.type());
    ASSERT_EQ(a.toListRef().size(), b.toListRef().size());
    for (size_t i = 0; i < a.toListRef().size(); ++i) {
      ExpectSame(a.toListRef()[i], b.toListRef()[i]);
    }
  } else {
    EXPECT_EQ(a, b);
  }
}

TEST(Values, RoundTrip) {
  const Values values = Sample();
  absl::StatusOr<Message> message = EncodeValues(values);
  ASSERT_TRUE(message.ok()) << message.status();
  absl::StatusOr<Values> decoded = DecodeValues(*message, UINT64_MAX);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_EQ(decoded->size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(values[i], (*decoded)[i]);
  }
  // Tensors are handed over, not copied.
  EXPECT_TRUE((*decoded)[12].toTensor().is_same(values[12].toTensor()));
  EXPECT_EQ(DecodeValues(*EncodeValues({}), UINT64_MAX)->size(), 0);
}

c10::IValue ListOfLists() {
  c10::impl::GenericList lists(c10::AnyType::get());
  lists.push_back(std::vector<int64_t>{1});
  return lists;
}

TEST(Values, WhatCannotBeSent) {
  for (const c10::IValue& value : {c10::IValue(at::make_generator<at::CPUGeneratorImpl>()),
                                   c10::IValue(c10::ivalue::Tuple::create({1, 2})), ListOfLists(),
                                   c10::IValue(at::zeros({1}).storage())}) {
    EXPECT_EQ(EncodeValues({1, value}).status().code(), absl::StatusCode::kUnimplemented)
        << value.tagKind();
  }
}

TEST(HostileValues, TensorsMustMatch) {
  Message message = *EncodeValues({at::zeros({1}), std::vector<at::Tensor>{at::zeros({1})}});
  Message more = message;
  more.tensors.push_back(at::zeros({1}));
  EXPECT_FALSE(DecodeValues(more, UINT64_MAX).ok());
  for (; !message.tensors.empty();) {
    message.tensors.pop_back();
    EXPECT_FALSE(DecodeValues(message, UINT64_MAX).ok());
  }
}

TEST(HostileValues, LengthsThatAreNotThere) {
  for (int tag = 0; tag < 256; ++tag) {
    for (uint64_t length : {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0}, uint64_t{1} << 61}) {
      Message message;
      WireWriter writer(&message.payload);
      writer.U8(1);
      writer.U32(2);
      writer.U8(static_cast<uint8_t>(tag));
      writer.U64(length);
      absl::StatusOr<Values> decoded = DecodeValues(message, UINT64_MAX);
      EXPECT_TRUE(!decoded.ok() || decoded->size() == 2) << tag;
    }
  }
}

// Each would take some of the stack of the thread that reads it.
TEST(HostileValues, ThereIsNoListWithinAList) {
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(int64_t{1});
  Message message = *EncodeValues({list});
  ASSERT_TRUE(DecodeValues(message, UINT64_MAX).ok());
  constexpr size_t kBegin = 5, kSize = 9;  // behind the version and the number; a tag and a length
  message.payload.insert(kBegin, message.payload.substr(kBegin, kSize));
  EXPECT_EQ(DecodeValues(message, UINT64_MAX).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(HostileValues, TruncatedAnywhere) {
  const Message whole = *EncodeValues(Sample());
  for (size_t size = 0; size < whole.payload.size(); ++size) {
    EXPECT_FALSE(
        DecodeValues(Message{whole.payload.substr(0, size), whole.tensors}, UINT64_MAX).ok())
        << size;
  }
}

// Memory is taken for what the bytes say that there is, which is more than they are.
TEST(HostileValues, NoMoreMemoryThanIsAllowed) {
  c10::List<bool> bools;
  c10::List<int64_t> ints;
  c10::List<std::string> strings;
  c10::List<std::optional<at::Tensor>> tensors;
  for (int i = 0; i < 1000; ++i) {
    bools.push_back(true);
    ints.push_back(i);
    strings.push_back("");
    tensors.push_back(std::nullopt);
  }
  const Values many = {bools, ints, strings, tensors, std::string(1000, 'x')};
  for (size_t i = 0; i < many.size(); ++i) {
    SCOPED_TRACE(i);
    const Message message = *EncodeValues({many[i]});
    const absl::StatusOr<Values> refused = DecodeValues(message, 1000);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
    EXPECT_NE(refused.status().message().find("limit message_bytes is 1000"), std::string::npos)
        << refused.status();
    EXPECT_TRUE(DecodeValues(message, 100'000).ok());
  }
  EXPECT_EQ(DecodeValues(*EncodeValues(Values(1000)), 1000).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(DecodeValues(*EncodeValues(Values(1000)), 16'000).ok());
  // A complex number has an object of its own.
  const Message complexes = *EncodeValues(Values(1000, c10::complex<double>(1, 2)));
  EXPECT_EQ(DecodeValues(complexes, 63'999).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(DecodeValues(complexes, 64'000).ok());
}

TEST(HostileValues, RandomCorruption) {
  std::mt19937 random(1);
  const Message whole = *EncodeValues(Sample());
  for (int round = 0; round < 10000; ++round) {
    Message message = whole;
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
      message.payload[random() % message.payload.size()] = static_cast<char>(random());
    }
    absl::StatusOr<Values> decoded = DecodeValues(std::move(message), UINT64_MAX);
    EXPECT_TRUE(!decoded.ok() || EncodeValues(*decoded).ok());
  }
}

}  // namespace
}  // namespace distgrad
