// What is expected of both sides in the scenarios comes true. Those that hang are left to the
// program `reference`: that something never ends, no test can wait for.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/conformance/measure.h"

namespace distgrad {
namespace {

constexpr int kLimitSeconds = 60;

void Check(const std::string& side, const std::vector<const Scenario*>& scenarios) {
  const std::vector<std::string> outcomes = Measure(side, scenarios, kLimitSeconds);
  for (size_t i = 0; i < scenarios.size(); ++i) {
    const char* const want = side == "pytorch" ? scenarios[i]->pytorch : scenarios[i]->distgrad;
    EXPECT_TRUE(IsExpected(outcomes[i], want))
        << scenarios[i]->name << ": " << outcomes[i] << "\nwhere it should begin: " << want;
  }
}

// One after the other in the same processes.
class ReferenceTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ReferenceTest, Together) {
  std::vector<const Scenario*> scenarios;
  for (const Scenario& scenario : Scenarios()) {
    if (!scenario.last) scenarios.push_back(&scenario);
  }
  Check(GetParam(), scenarios);
}

INSTANTIATE_TEST_SUITE_P(Sides, ReferenceTest, ::testing::Values("distgrad", "pytorch"),
                         [](const auto& info) { return info.param; });

// Each in processes of its own.
class AloneTest : public ::testing::TestWithParam<std::tuple<std::string, const Scenario*>> {};

TEST_P(AloneTest, Alone) {
  const auto& [side, scenario] = GetParam();
  if (side == "pytorch" && scenario->pytorch == std::string(kHangs))
    GTEST_SKIP() << "it hangs: see tests/conformance:reference";
  Check(side, {scenario});
}

std::vector<const Scenario*> ThoseAlone() {
  std::vector<const Scenario*> alone;
  for (const Scenario& scenario : Scenarios()) {
    if (scenario.last) alone.push_back(&scenario);
  }
  return alone;
}

INSTANTIATE_TEST_SUITE_P(Sides, AloneTest,
                         ::testing::Combine(::testing::Values("distgrad", "pytorch"),
                                            ::testing::ValuesIn(ThoseAlone())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param)->name;
                         });

}  // namespace
}  // namespace distgrad

int main(int argc, char** argv) {
  if (distgrad::IsScenarioWorker(argc, argv)) distgrad::RunScenarioWorker(argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
