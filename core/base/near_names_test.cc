// Names that are near to each other, those that are not, and lists of names.
#include "core/base/near_names.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace distgrad {
namespace {

TEST(NearNamesTest, TwoLettersMayDiffer) {
  for (const auto& [a, b] :
       std::vector<std::pair<std::string, std::string>>{{"forward", "forward"},
                                                        {"forward", "foward"},    // one left out
                                                        {"forward", "forwards"},  // one added
                                                        {"forward", "fxrwxrd"},   // two changed
                                                        {"", "ab"}}) {
    EXPECT_TRUE(IsNearName(a, b)) << a << " " << b;
    EXPECT_TRUE(IsNearName(b, a)) << a << " " << b;
  }
  EXPECT_FALSE(IsNearName("forward", "fxxwxrd"));
  EXPECT_FALSE(IsNearName("forward", "forwardabc"));
  EXPECT_FALSE(IsNearName("forward", "backward"));
}

TEST(NearNamesTest, LongNamesAreNearToNothing) {
  const std::string longest(kMaxNearName, 'x');
  EXPECT_TRUE(IsNearName(longest, longest));
  EXPECT_FALSE(IsNearName(longest + "x", longest));
  EXPECT_FALSE(IsNearName(longest + "x", longest + "x"));
}

TEST(NearNamesTest, EightNamesAreShown) {
  std::set<std::string> names;
  EXPECT_EQ(FirstNames(names), "");
  for (const char* name : {"h", "g", "f", "e", "d", "c", "b", "a"}) names.insert(name);
  EXPECT_EQ(FirstNames(names), "a, b, c, d, e, f, g, h");
  names.insert("i");
  EXPECT_EQ(FirstNames(names), "a, b, c, d, e, f, g, h, ...");
}

}  // namespace
}  // namespace distgrad
