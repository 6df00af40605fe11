// The checksums that the standards give, and sums that go on.
#include "core/base/crc32c.h"

#include <string>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
TEST(Crc32cTest, HasTheValuesOfTheStandard) {
  EXPECT_EQ(Crc32c(""), 0u);
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising;
  for (char i = 0; i < 32; ++i) rising.push_back(i);
  EXPECT_EQ(Crc32c(rising), 0x46dd794eu);
}

TEST(Crc32cTest, GoesOnFromAnyPlace) {
  std::string text;
  for (int i = 0; i < 100; ++i) text.push_back(static_cast<char>(i * 37));
  const uint32_t whole = Crc32c(text);
  for (size_t i = 0; i <= text.size(); ++i) {
    EXPECT_EQ(Crc32c(text.substr(i), Crc32c(text.substr(0, i))), whole) << i;
  }
}

}  // namespace
}  // namespace distgrad
