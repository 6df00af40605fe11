// As many seeds as fit into the budget; programs that once failed; and that the simulation is one:
// the same seed gives the same course. tools/planted.py shows that it finds defects.
#include <gtest/gtest.h>
#include <sys/personality.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/simulation/job.h"
#include "tests/simulation/runner.h"
#include "tests/simulation/runner_tests.h"

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
constexpr uint64_t kFewest = 500, kMost = 1300;

std::string Repeat(uint64_t seed, const Outcome& outcome) {
  return absl::StrCat("seed ", seed, ": ", outcome.wrong, "\n", Text(DrawPlan(seed)),
                      outcome.printed,
                      "\nto have it smaller: tools/bazel run //tests/simulation -- --from ", seed);
}

TEST_F(SimulationTest, EveryCallAndPassEndsAsItShould) {
  const auto end = std::chrono::steady_clock::now() + kBudget;
  uint64_t seed = 0;
  for (; seed < kMost && (seed < kFewest || std::chrono::steady_clock::now() < end); ++seed) {
    const Outcome outcome = runner->Run(Text(DrawPlan(seed)));
    ASSERT_TRUE(outcome.ok) << Repeat(seed, outcome);
  }
  RecordProperty("seeds", static_cast<int>(seed));
  // A slow machine runs few, and passes all the same: .ci/run shows this line.
  const std::string ran = absl::StrCat(seed, " of at most ", kMost, " seeds of the simulation ran");
  std::printf("%s\n", ran.c_str());
}

// Each file of cases/ is a program that once failed, shrunk, and says why. The course of its own
// seed changes with the code; so it is run with others, too.
TEST_F(SimulationTest, WhatOnceFailedDoesNotFailAgain) {
  constexpr uint64_t kSeeds = 20;
  int cases = 0;
  for (const auto& file : std::filesystem::directory_iterator("tests/simulation/cases")) {
    SCOPED_TRACE(file.path());
    std::stringstream text;
    text << std::ifstream(file.path()).rdbuf();
    Plan plan = ReadPlan(text.str());
    ASSERT_FALSE(plan.actions.empty());
    ++cases;
    for (uint64_t i = 0; i < kSeeds; ++i, ++plan.seed) {
      const Outcome outcome = runner->Run(Text(plan));
      ASSERT_TRUE(outcome.ok) << "seed " << plan.seed << ": " << outcome.wrong << "\n"
                              << outcome.printed;
    }
  }
  EXPECT_GT(cases, 0) << "the cases are not where they are looked for";
}

// A case has to have all that its seed has drawn.
TEST_F(SimulationTest, APlanIsReadAsItWasWritten) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const std::string text = Text(DrawPlan(seed));
    ASSERT_EQ(Text(ReadPlan(text)), text);
  }
}

TEST_F(SimulationTest, TheSameSeedTakesTheSameCourse) {
  uint64_t before = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Course course = runner->Run(Text(DrawPlan(seed))).course;
    const Course again = runner->Run(Text(DrawPlan(seed))).course;
    EXPECT_EQ(course.hash, again.hash) << "seed " << seed;
    EXPECT_EQ(course.switches, again.switches) << "seed " << seed;
    EXPECT_NE(course.hash, before) << "seed " << seed;
    before = course.hash;
  }
}

// Else a seed that fails here fails nowhere else.
TEST_F(SimulationTest, AnotherEnvironmentChangesNothing) {
  const int persona = personality(0xffffffff);
  if (persona == -1 || personality(persona | ADDR_NO_RANDOMIZE) == -1) {
    GTEST_SKIP() << "the system does not let programs have the same addresses each time";
  }
  personality(persona);
  for (int i = 0; i < 40; ++i) {
    setenv(absl::StrCat("SIMULATION_TEST_", i).c_str(), std::string(100 * i, 'x').c_str(), 1);
  }
  Runner elsewhere;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::string plan = Text(DrawPlan(seed));
    EXPECT_EQ(runner->Run(plan).course.hash, elsewhere.Run(plan).course.hash) << "seed " << seed;
  }
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  namespace simulation = distgrad::simulation;
  return simulation::RunTests(argc, argv, simulation::RunJob, simulation::WarmUp,
                              &simulation::runner);
}
