// Arguments and results as messages and back, cut short and at random.
#include "core/tensor/values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/List.h>

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
  absl::StatusOr<Values> decoded = DecodeValues(*message);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_EQ(decoded->size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(values[i], (*decoded)[i]);
  }
  // Tensors are handed over, not copied.
  EXPECT_TRUE((*decoded)[12].toTensor().is_same(values[12].toTensor()));
  EXPECT_EQ(DecodeValues(*EncodeValues({}))->size(), 0);
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
  EXPECT_FALSE(DecodeValues(more).ok());
  for (; !message.tensors.empty();) {
    message.tensors.pop_back();
    EXPECT_FALSE(DecodeValues(message).ok());
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
      absl::StatusOr<Values> decoded = DecodeValues(message);
      EXPECT_TRUE(!decoded.ok() || decoded->size() == 2) << tag;
    }
  }
}

TEST(HostileValues, TruncatedAnywhere) {
  const Message whole = *EncodeValues(Sample());
  for (size_t size = 0; size < whole.payload.size(); ++size) {
    EXPECT_FALSE(DecodeValues(Message{whole.payload.substr(0, size), whole.tensors}).ok()) << size;
  }
}

TEST(HostileValues, RandomCorruption) {
  std::mt19937 random(1);
  const Message whole = *EncodeValues(Sample());
  for (int round = 0; round < 10000; ++round) {
    Message message = whole;
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
      message.payload[random() % message.payload.size()] = static_cast<char>(random());
    }
    absl::StatusOr<Values> decoded = DecodeValues(std::move(message));
    EXPECT_TRUE(!decoded.ok() || EncodeValues(*decoded).ok());
  }
}

}  // namespace
}  // namespace distgrad
