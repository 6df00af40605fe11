// As many seeds as fit into 45 s; and that the simulation is one: the same seed gives the same
// course. docs/testing.md has what finds the defects that are planted.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/simulation/job.h"
#include "tests/simulation/runner.h"

namespace distgrad::simulation {
namespace {

Runner* runner = nullptr;

class SimulationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kCanSimulate) GTEST_SKIP() << "a sanitizer has functions of its own in place of libc's";
  }
};

constexpr auto kBudget = std::chrono::seconds(45);
constexpr uint64_t kFewest = 100, kMost = 1300;

std::string Repeat(uint64_t seed, const Outcome& outcome) {
  return absl::StrCat("seed ", seed, ": ", outcome.wrong, "\n",
                      Text(PlanOf(OrderText(seed, kAllFaults, {}))), outcome.printed,
                      "\nto have it smaller: tools/bazel run //tests/simulation -- --from ", seed);
}

TEST_F(SimulationTest, EveryCallAndPassEndsAsItShould) {
  const auto end = std::chrono::steady_clock::now() + kBudget;
  uint64_t seed = 0;
  for (; seed < kMost && (seed < kFewest || std::chrono::steady_clock::now() < end); ++seed) {
    const Outcome outcome = runner->Run(OrderText(seed, kAllFaults, {}));
    ASSERT_TRUE(outcome.ok) << Repeat(seed, outcome);
  }
  RecordProperty("seeds", static_cast<int>(seed));
}

TEST_F(SimulationTest, TheSameSeedTakesTheSameCourse) {
  uint64_t before = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Course course = runner->Run(OrderText(seed, kAllFaults, {})).course;
    const Course again = runner->Run(OrderText(seed, kAllFaults, {})).course;
    EXPECT_EQ(course.hash, again.hash) << "seed " << seed;
    EXPECT_EQ(course.switches, again.switches) << "seed " << seed;
    EXPECT_NE(course.hash, before) << "seed " << seed;
    before = course.hash;
  }
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  using distgrad::simulation::Runner;
  Runner::FixAddresses(argv);
  ::testing::InitGoogleTest(&argc, argv);
  Runner runner(distgrad::simulation::RunJob, distgrad::simulation::WarmUp);
  distgrad::simulation::runner = &runner;
  return RUN_ALL_TESTS();
}
