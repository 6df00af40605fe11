// Headers as the Python package writes them, and everything that a header may not say.
#include "core/checkpoint/safetensors_header.h"

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using c10::ScalarType;

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  uint64_t begin, uint64_t end) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":[", begin, ",", end, "]}");
}

void ExpectRefused(const std::string& json, uint64_t data_bytes, const std::string& part) {
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(json, data_bytes);
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << json;
  EXPECT_TRUE(absl::StrContains(header.status().message(), part))
      << header.status() << "\nlacks " << part << "\nof " << json.substr(0, 200);
  EXPECT_LT(header.status().message().size(), 1000u);
}

TEST(SafetensorsHeaderTest, IsRead) {
  const absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(
      absl::StrCat("{ \"__metadata__\": {\"format\":\"pt\", \"\":\"\\u00e9\"},\n",
                   Entry("a.weight", "BF16", "[2,3]", 8, 20), ",\t",
                   Entry("\\\"\\u4e2d", "I64", "[]", 0, 8), ", ",
                   Entry("empty", "F32", "[3, 0]", 8, 8), ",", Entry("", "F4", "[2,4]", 20, 24),
                   "}   \n"),
      24);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata,
            (std::map<std::string, std::string>{{"format", "pt"}, {"", "\u00e9"}}));
  ASSERT_EQ(header->tensors.size(), 4u);
  const SafetensorsInfo& weight = header->tensors.at("a.weight");
  EXPECT_EQ(weight.dtype, ScalarType::BFloat16);
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(weight.begin, 8u);
  EXPECT_EQ(weight.end, 20u);
  EXPECT_TRUE(header->tensors.at("\"\u4e2d").shape.empty());
  EXPECT_EQ(header->tensors.at("").shape, (std::vector<int64_t>{2, 2}));
  EXPECT_TRUE(ParseSafetensorsHeader("{}", 0).ok());
  EXPECT_TRUE(ParseSafetensorsHeader("{\"__metadata__\":{}}", 0).ok());
}

TEST(SafetensorsHeaderTest, WhatIsNoSuchHeaderIsRefused) {
  ExpectRefused("", 0, "does not begin with {");
  ExpectRefused(" {}", 0, "does not begin with {");
  ExpectRefused("\xef\xbb\xbf{}", 0, "does not begin with {");
  ExpectRefused("[]", 0, "does not begin with {");
  ExpectRefused("{", 0, "no JSON in UTF-8 at its byte ");
  ExpectRefused("{}}", 0, "no JSON in UTF-8 at its byte 3");
  ExpectRefused("{} {}", 0, "no JSON");
  ExpectRefused("{/**/}", 0, "no JSON");
  ExpectRefused(std::string("{}\0x", 4), 0, "has a byte 0");
  ExpectRefused("{\"a\":{},}", 0, "'a' has no dtype");
  ExpectRefused("{\"a\xff\":{}}", 0, "no JSON in UTF-8");
  ExpectRefused("{\"a\\ud800\":{}}", 0, "no JSON in UTF-8");
  ExpectRefused("{\"a\n\":{}}", 0, "no JSON");
  ExpectRefused("{\"a\":1e999}", 0, "no JSON");
  ExpectRefused(absl::StrCat("{\"a\":", std::string(1'000'000, '['), "}"), 0, "'a' is an array");
  ExpectRefused(absl::StrCat("{\"a\":{\"shape\":", std::string(1'000'000, '['), "}"), 0,
                "'a' has an array in 'shape'");
  std::string deep = "{";
  for (int i = 0; i < 100'000; ++i) deep += "\"a\":{";
  ExpectRefused(deep, 0, "has an unknown key 'a'");
  // The bound is looked at before anything else.
  ExpectRefused(std::string(kMaxSafetensorsHeaderBytes + 1, ' '), 0, "more than the format allows");
}

TEST(SafetensorsHeaderTest, AnEntryHasItsThreeKeysOnce) {
  ExpectRefused("{\"a\":null}", 0, "'a' is null");
  ExpectRefused("{\"a\":true}", 0, "'a' is a boolean");
  ExpectRefused("{\"a\":\"F32\"}", 0, "'a' is a string");
  ExpectRefused("{\"a\":3}", 0, "'a' is a number");
  ExpectRefused("{\"a\":[]}", 0, "'a' is an array");
  ExpectRefused("{\"a\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4, "'a' has no dtype");
  ExpectRefused("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "'a' has no shape");
  ExpectRefused("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 4, "'a' has no two data_offsets");
  ExpectRefused("{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[4]}}", 4,
                "'a' has no two data_offsets");
  ExpectRefused("{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4,4]}}", 4,
                "'a' has more than two data_offsets");
  ExpectRefused("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 4, "'a' has dtype twice");
  ExpectRefused("{\"a\":{\"shape\":[2],\"shape\":[2]}}", 4, "'a' has shape twice");
  ExpectRefused("{\"a\":{\"extra\":1}}", 4, "'a' has an unknown key 'extra'");
  ExpectRefused("{\"a\":{\"dtype\":7}}", 4, "'a' has a number in 'dtype'");
  ExpectRefused("{\"a\":{\"dtype\":[\"F32\"]}}", 4, "'a' has an array in 'dtype'");
  ExpectRefused("{\"a\":{\"shape\":\"[]\"}}", 4, "'a' has a string in 'shape'");
  ExpectRefused("{\"a\":{\"shape\":[\"1\"]}}", 4, "'a' has a string in 'shape'");
  ExpectRefused("{\"a\":{\"shape\":[{}]}}", 4, "'a' has an object in 'shape'");
  ExpectRefused("{\"a\":{\"shape\":{}}}", 4, "'a' has an object in 'shape'");
  ExpectRefused("{\"a\":{\"dtype\":\"f32\"}}", 4, "'a' has dtype 'f32', which is not known");
  ExpectRefused("{\"a\":{\"dtype\":\"F6_E2M3\"}}", 4,
                "'a' has dtype 'F6_E2M3', which is not known");
  const std::string one = Entry("a", "U8", "[1]", 0, 1);
  ExpectRefused(absl::StrCat("{", one, ",", Entry("a", "U8", "[1]", 1, 2), "}"), 2,
                "'a' is there twice");
  // Two spellings of one name.
  ExpectRefused(absl::StrCat("{", one, ",", Entry("\\u0061", "U8", "[1]", 1, 2), "}"), 2,
                "'a' is there twice");
}

TEST(SafetensorsHeaderTest, MetadataAreStrings) {
  ExpectRefused("{\"__metadata__\":\"x\"}", 0, "'__metadata__' is a string");
  ExpectRefused("{\"__metadata__\":{\"a\":1}}", 0, "'__metadata__' has a number in 'a'");
  ExpectRefused("{\"__metadata__\":{\"a\":null}}", 0, "'__metadata__' has null in 'a'");
  ExpectRefused("{\"__metadata__\":{\"a\":{}}}", 0, "'__metadata__' has an object in 'a'");
  ExpectRefused("{\"__metadata__\":{\"a\":[]}}", 0, "'__metadata__' has an array in 'a'");
  ExpectRefused("{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "'__metadata__' has 'a' twice");
  ExpectRefused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "'__metadata__' is there twice");
}

TEST(SafetensorsHeaderTest, NumbersAreSizes) {
  for (const std::string wrong : {"-1", "1.0", "1e0", "true", "null", "18446744073709551616"}) {
    ExpectRefused(absl::StrCat("{\"a\":{\"shape\":[", wrong, "]}}"), 0, "'a' has ");
    ExpectRefused(absl::StrCat("{\"a\":{\"data_offsets\":[", wrong, "]}}"), 0, "'a' has ");
  }
  ExpectRefused("{\"a\":{\"shape\":[9223372036854775808]}}", 0,
                "'a' has a dimension of 9223372036854775808");
  std::string many = "1";
  for (size_t i = 1; i < kMaxSafetensorsDimensions; ++i) many += ",1";
  EXPECT_TRUE(ParseSafetensorsHeader(
                  absl::StrCat("{", Entry("a", "U8", absl::StrCat("[", many, "]"), 0, 1), "}"), 1)
                  .ok());
  ExpectRefused(absl::StrCat("{\"a\":{\"shape\":[", many, ",1]}}"), 0,
                "'a' has more than 64 dimensions");
}

TEST(SafetensorsHeaderTest, BytesAreThoseOfDtypeAndShape) {
  const auto refused = [](const std::string& dtype, const std::string& shape, uint64_t begin,
                          uint64_t end, const std::string& part) {
    ExpectRefused(absl::StrCat("{", Entry("a", dtype, shape, begin, end), "}"), end, part);
  };
  refused("F32", "[2]", 0, 4, "'a' has 4 bytes, where dtype F32 and shape [2] need 8");
  refused("F32", "[2]", 8, 0, "'a' ends before it begins");
  refused("U8", "[4294967296,4294967296]", 0, 0, "which is too large");
  refused("U8", "[9223372036854775807,2]", 0, 18446744073709551614u, "which is too large");
  refused("I64", "[1152921504606846976,16]", 0, 0, "which is too large");
  // libtorch multiplies the other dimensions too.
  refused("U8", "[0,4294967296,4294967296]", 0, 0, "which is too large");
  refused("U8", "[4294967296,4294967296,0]", 0, 0, "which is too large");
  refused("F4", "[]", 0, 0, "last dimension is not even");
  refused("F4", "[2,3]", 0, 3, "last dimension is not even");
}

TEST(SafetensorsHeaderTest, TensorsAreAllOfTheFileAndOnce) {
  const std::string a = Entry("a", "U8", "[4]", 0, 4);
  ExpectRefused(absl::StrCat("{", a, ",", Entry("b", "U8", "[4]", 2, 6), "}"), 6,
                "'a' and 'b' have bytes in common");
  ExpectRefused(absl::StrCat("{", a, ",", Entry("b", "U8", "[4]", 0, 4), "}"), 4,
                "'a' and 'b' have bytes in common");
  ExpectRefused(absl::StrCat("{", a, ",", Entry("b", "U8", "[0]", 2, 2), "}"), 4,
                "'a' and 'b' have bytes in common");
  ExpectRefused(absl::StrCat("{", a, ",", Entry("b", "U8", "[4]", 6, 10), "}"), 10,
                "the 2 bytes before 'b' are no tensor's");
  ExpectRefused(absl::StrCat("{", Entry("b", "U8", "[4]", 1, 5), "}"), 5,
                "the 1 bytes before 'b' are no tensor's");
  ExpectRefused(absl::StrCat("{", a, "}"), 3, "says that there are 4: the file has been cut");
  ExpectRefused(absl::StrCat("{", a, "}"), 5, "says that there are 4");
  ExpectRefused("{}", 1, "says that there are 0");
  const uint64_t far = uint64_t{1} << 63;
  ExpectRefused(absl::StrCat("{", Entry("a", "U8", "[1]", far, far + 1), "}"), far + 1,
                "are no tensor's");
}

TEST(SafetensorsHeaderTest, ErrorsQuoteNamesOfAnybody) {
  EXPECT_EQ(QuoteName("a.\u4e2d"), "'a.\u4e2d'");
  EXPECT_EQ(QuoteName("\n\x1b[2J\""), "'\\n\\x1b[2J\\\"'");
  const std::string most(100, 'x');
  EXPECT_EQ(QuoteName(most), "'" + most + "'");
  EXPECT_EQ(QuoteName(most + "x"), "'" + most + "...'");
  EXPECT_EQ(QuoteName(std::string(99, 'x') + "\u4e2d"), "'" + std::string(99, 'x') + "...'");
}

TEST(SafetensorsHeaderTest, IsWrittenAsThePythonPackageDoes) {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"a\"\n\x01\u00e9", "\\"}};
  header.tensors["z"] = {ScalarType::Byte, {3}};
  header.tensors["a"] = {ScalarType::Byte, {}};
  header.tensors["big"] = {ScalarType::Double, {1, 2}};
  header.tensors["e"] = {ScalarType::Bool, {0, 4}};
  header.tensors["f4"] = {ScalarType::Float4_e2m1fn_x2, {2, 2}};
  const absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors(&header);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<std::string> order;
  for (const std::string* name : layout->order) order.push_back(*name);
  EXPECT_EQ(order, (std::vector<std::string>{"big", "a", "z", "f4", "e"}));
  const std::string json =
      "{\"__metadata__\":{\"a\\\"\\n\\u0001\u00e9\":\"\\\\\",\"format\":\"pt\"},"
      "\"big\":{\"dtype\":\"F64\",\"shape\":[1,2],\"data_offsets\":[0,16]},"
      "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[16,17]},"
      "\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[17,20]},"
      "\"f4\":{\"dtype\":\"F4\",\"shape\":[2,4],\"data_offsets\":[20,24]},"
      "\"e\":{\"dtype\":\"BOOL\",\"shape\":[0,4],\"data_offsets\":[24,24]}}";
  ASSERT_GT(layout->header.size(), json.size() + 7);
  EXPECT_EQ(layout->header.size() % 8, 0u);
  EXPECT_LT(layout->header.size(), json.size() + 16);
  uint64_t length = 0;
  std::memcpy(&length, layout->header.data(), sizeof(length));
  EXPECT_EQ(length, layout->header.size() - 8);
  EXPECT_EQ(layout->header.substr(8, json.size()), json);
  EXPECT_EQ(layout->header.substr(8 + json.size()),
            std::string(layout->header.size() - 8 - json.size(), ' '));
  const absl::StatusOr<SafetensorsHeader> same =
      ParseSafetensorsHeader(layout->header.substr(8), 24);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(same->metadata, header.metadata);
  EXPECT_EQ(same->tensors.at("f4").shape, (std::vector<int64_t>{2, 2}));

  SafetensorsHeader none;
  const absl::StatusOr<SafetensorsLayout> empty = LayOutSafetensors(&none);
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ(empty->header, absl::StrCat(std::string("\x08\0\0\0\0\0\0\0", 8), "{}      "));
}

TEST(SafetensorsHeaderTest, OffsetsHave64Bits) {
  constexpr int64_t kMany = int64_t{5} << 30;
  SafetensorsHeader header;
  header.tensors["a"] = {ScalarType::Double, {kMany}};
  header.tensors["b"] = {ScalarType::Double, {1, kMany, 2}};
  ASSERT_TRUE(LayOutSafetensors(&header).ok());
  EXPECT_EQ(header.tensors["b"].begin, uint64_t{40} << 30);
  EXPECT_EQ(header.tensors["b"].end, uint64_t{120} << 30);
  header.tensors["c"] = {ScalarType::Double, {kMany, kMany}};
  const absl::Status refused = LayOutSafetensors(&header).status();
  EXPECT_TRUE(absl::StrContains(refused.message(), "'c' has shape")) << refused;
}

TEST(SafetensorsHeaderTest, WhatMayNotBeInAHeaderIsNotWritten) {
  const auto refused = [](const std::string& name, ScalarType dtype, std::vector<int64_t> shape,
                          const std::string& part) {
    SafetensorsHeader header;
    header.tensors[name] = {dtype, std::move(shape)};
    const absl::Status status = LayOutSafetensors(&header).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << part;
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status << "\nlacks " << part;
  };
  refused("__metadata__", ScalarType::Byte, {}, "'__metadata__' is what the format calls");
  refused("a", ScalarType::ComplexDouble, {}, "'a' has dtype ComplexDouble");
  refused("a", ScalarType::QInt8, {}, "'a' has dtype QInt8");
  refused("a", ScalarType::Byte, std::vector<int64_t>(65, 1), "'a' has more than 64 dimensions");
  refused("a", ScalarType::Float4_e2m1fn_x2, {}, "'a' is of dtype F4 and has no dimension");
  refused("a\xff", ScalarType::Byte, {}, "'a\\xff' or its value is not UTF-8");
  SafetensorsHeader header;
  header.metadata["key"] = "\xff";
  EXPECT_TRUE(
      absl::StrContains(LayOutSafetensors(&header).status().message(), "'key' or its value"));
  header.metadata["key"] = std::string(kMaxSafetensorsHeaderBytes, 'x');
  EXPECT_TRUE(absl::StrContains(LayOutSafetensors(&header).status().message(), "which is more"));
}

}  // namespace
}  // namespace distgrad
