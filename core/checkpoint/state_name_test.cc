// Names of an optimizer's state, and what is none.
#include "core/checkpoint/state_name.h"

#include "gtest/gtest.h"

namespace distgrad {
namespace {

TEST(StateNameTest, TheEntryIsBehindTheLastDot) {
  const std::optional<StateName> name = ParseStateName("state.layer.0.weight.exp_avg");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->parameter, "layer.0.weight");
  EXPECT_EQ(name->entry, "exp_avg");
  EXPECT_EQ(name->Text(), "state.layer.0.weight.exp_avg");
  EXPECT_EQ(ParseStateName("state..step")->parameter, "");
}

TEST(StateNameTest, OthersAreNone) {
  for (const char* none : {"", "state", "state.", "state.weight", "weight.exp_avg",
                           "param_groups.0.lr", "state.weight.exp avg", "State.weight.step"}) {
    EXPECT_FALSE(ParseStateName(none).has_value()) << none;
  }
  EXPECT_FALSE(ParseStateName("state.weight." + std::string(101, 'a')).has_value());
  EXPECT_TRUE(IsStateWord("exp_avg2"));
  EXPECT_FALSE(IsStateWord("exp-avg"));
}

}  // namespace
}  // namespace distgrad
