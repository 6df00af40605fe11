// Which worker made an id, read from its upper bits.
#include "core/base/ids.h"

#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(IdsTest, MakerAboveCounter) {
  const uint64_t id = MakeId(0xfffe, 5);
  EXPECT_EQ(id, 0xfffe000000000005u);
  EXPECT_EQ(MakerOf(id), 0xfffe);
  EXPECT_EQ(CounterOf(id), 5u);
  // A counter that overflows never touches the maker.
  EXPECT_EQ(MakerOf(MakeId(3, uint64_t{1} << kCounterBits)), 3);
}

}  // namespace
}  // namespace distgrad
