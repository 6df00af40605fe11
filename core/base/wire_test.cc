// Numbers and strings as bytes and back, cut short at every byte and with lengths that lie.
#include "core/base/wire.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

std::string OneOfEach() {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U8(0x12);
  writer.U16(0x3456);
  writer.U32(0x789abcde);
  writer.U64(0x0123456789abcdef);
  writer.I64(-2);
  writer.F64(-0.5);
  writer.Bytes(absl::string_view("by\0tes", 6));
  writer.Str16("name");
  writer.Raw("raw", 3);
  return bytes;
}

// Reads OneOfEach, checking each value that was there; returns how many were.
int ReadOneOfEach(WireReader& reader) {
  int good = 0;
  const auto check = [&](bool equal, bool empty) {
    EXPECT_TRUE(reader.ok() ? equal : empty) << "after " << good;
    if (reader.ok()) ++good;
  };
  const uint8_t u8 = reader.U8();
  check(u8 == 0x12, u8 == 0);
  const uint16_t u16 = reader.U16();
  check(u16 == 0x3456, u16 == 0);
  const uint32_t u32 = reader.U32();
  check(u32 == 0x789abcde, u32 == 0);
  const uint64_t u64 = reader.U64();
  check(u64 == 0x0123456789abcdef, u64 == 0);
  const int64_t i64 = reader.I64();
  check(i64 == -2, i64 == 0);
  const double f64 = reader.F64();
  check(f64 == -0.5, f64 == 0);
  const absl::string_view bytes = reader.Bytes();
  check(bytes == absl::string_view("by\0tes", 6), bytes.empty());
  const absl::string_view name = reader.Str16();
  check(name == "name", name.empty());
  char raw[3] = {'?', '?', '?'};
  const bool there = reader.Raw(raw, 3);
  EXPECT_EQ(there, reader.ok());
  check(std::string(raw, 3) == "raw", std::string(raw, 3) == std::string(3, '\0'));
  return good;
}

TEST(WireTest, RoundTrip) {
  const std::string bytes = OneOfEach();
  WireReader reader(bytes);
  EXPECT_EQ(reader.remaining(), bytes.size());
  EXPECT_EQ(ReadOneOfEach(reader), 9);
  EXPECT_EQ(reader.remaining(), 0u);
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.status("it"), absl::OkStatus());
  EXPECT_EQ(reader.Rest(), "");
  EXPECT_TRUE(reader.ok());
}

TEST(WireTest, LittleEndianWithoutPadding) {
  EXPECT_EQ(OneOfEach().substr(0, 7), "\x12\x56\x34\xde\xbc\x9a\x78");
  EXPECT_EQ(OneOfEach().size(), 1u + 2 + 4 + 8 + 8 + 8 + 4 + 6 + 2 + 4 + 3);
}

TEST(WireTest, TruncatedAtEveryByte) {
  const std::string bytes = OneOfEach();
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    // A copy of exactly this size, so that a sanitizer sees a read past its end.
    const std::unique_ptr<char[]> cut(new char[size]);
    std::memcpy(cut.get(), bytes.data(), size);
    WireReader reader(absl::string_view(cut.get(), size));
    EXPECT_LT(ReadOneOfEach(reader), 9);
    EXPECT_FALSE(reader.ok());
    EXPECT_EQ(reader.remaining(), 0u);
    EXPECT_EQ(reader.Rest(), "");
    EXPECT_EQ(reader.status("the frame"), absl::InvalidArgumentError("the frame ends too early"));
  }
}

TEST(WireTest, AFailureStays) {
  WireReader reader(absl::string_view("\x05\x00\x01\x02", 4));
  EXPECT_EQ(reader.Str16(), "");  // says 5 bytes, there are 2
  EXPECT_EQ(reader.U8(), 0);      // though a byte is there
  EXPECT_FALSE(reader.ok());
}

TEST(WireTest, HugeLengths) {
  WireReader bytes("\xff\xff\xff\xffxyz");
  EXPECT_EQ(bytes.Bytes(), "");
  EXPECT_FALSE(bytes.ok());
  WireReader raw("xyz");
  char four[4] = {'?', '?', '?', '?'};
  EXPECT_FALSE(raw.Raw(four, 4));
  EXPECT_EQ(std::string(four, 4), std::string(4, '\0'));
}

TEST(WireTest, EmptyThings) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.Bytes("");
  writer.Str16("");
  writer.Raw(nullptr, 0);
  EXPECT_EQ(bytes.size(), 6u);
  WireReader reader(bytes);
  EXPECT_EQ(reader.Bytes(), "");
  EXPECT_EQ(reader.Str16(), "");
  EXPECT_TRUE(reader.Raw(nullptr, 0));
  EXPECT_TRUE(reader.ok());
  EXPECT_FALSE(WireReader("").U8());
}

TEST(WireTest, RestTakesAll) {
  WireReader reader("\x01rest");
  EXPECT_EQ(reader.U8(), 1);
  EXPECT_EQ(reader.Rest(), "rest");
  EXPECT_EQ(reader.remaining(), 0u);
  EXPECT_TRUE(reader.ok());
}

TEST(WireTest, ExtremeNumbers) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.I64(std::numeric_limits<int64_t>::min());
  writer.F64(std::numeric_limits<double>::infinity());
  writer.Str16(std::string(0xffff, 'x'));
  WireReader reader(bytes);
  EXPECT_EQ(reader.I64(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(reader.F64(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(reader.Str16().size(), 0xffffu);
}

TEST(WireDeathTest, ALengthThatDoesNotFitIsOurBug) {
  std::string bytes;
  WireWriter writer(&bytes);
  EXPECT_DEATH(writer.Str16(std::string(0x10000, 'x')), "65536 bytes");
}

}  // namespace
}  // namespace distgrad
