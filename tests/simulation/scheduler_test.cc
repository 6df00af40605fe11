// Order, time and chance by the seed, and threads that wait for ever.
#include "tests/simulation/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/simulation/runner.h"

namespace distgrad::simulation {
namespace {

using Steady = std::chrono::steady_clock;

Runner* runner = nullptr;

class SchedulerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kCanSimulate) GTEST_SKIP() << "a sanitizer has functions of its own in place of libc's";
  }
};

// Two threads count without a lock, and lose what they count where the other one goes first.
std::string LostCount() {
  int count = 0;
  std::mutex mu;
  const auto add = [&] {
    for (int i = 0; i < 10; ++i) {
      const int seen = count;
      { std::lock_guard<std::mutex> lock(mu); }
      count = seen + 1;
    }
  };
  std::thread a(add), b(add);
  a.join();
  b.join();
  return absl::StrCat(count);
}

// Each takes the lock of the other while it has its own.
std::string Deadlock(absl::Mutex* first, absl::Mutex* second) {
  const auto take = [](absl::Mutex* one, absl::Mutex* other) {
    absl::MutexLock lock(one);
    absl::SleepFor(absl::Milliseconds(1));
    absl::MutexLock both(other);
  };
  std::thread a(take, first, second), b(take, second, first);
  a.join();
  b.join();
  return "it ended";
}

// All ways to wait, each for an hour.
std::string Hours() {
  const auto begin = Steady::now();
  const absl::Time wall = absl::Now();
  absl::SleepFor(absl::Hours(1));
  std::this_thread::sleep_for(std::chrono::hours(1));
  std::mutex mu;
  std::condition_variable never;
  {
    std::unique_lock<std::mutex> lock(mu);
    if (never.wait_for(lock, std::chrono::hours(1), [] { return false; })) return "it came true";
  }
  absl::Mutex absl_mu;
  bool flag = false;
  std::thread other([&] {
    absl::SleepFor(absl::Hours(1));
    absl::MutexLock lock(&absl_mu);
    flag = true;
  });
  {
    absl::MutexLock lock(&absl_mu);
    absl_mu.Await(absl::Condition(&flag));
  }
  other.join();
  const double hours = std::chrono::duration<double>(Steady::now() - begin).count() / 3600;
  const double wall_hours = absl::ToDoubleHours(absl::Now() - wall);
  if (hours < 4 || hours > 4.001) return absl::StrCat(hours, " hours");
  if (wall_hours < 4 || wall_hours > 4.001) return absl::StrCat(wall_hours, " hours");
  return "";
}

std::string Scenario(absl::string_view order, Course* course) {
  const size_t space = order.find(' ');
  const absl::string_view name = order.substr(0, space);
  Schedule schedule;
  if (!absl::SimpleAtoi(order.substr(space + 1), &schedule.seed)) return "no seed";
  schedule.preempt_one_in = 4;
  schedule.time_limit = int64_t{24} * 3600 * 1000000000;
  absl::Mutex first, second;
  Begin(schedule);
  std::string result;
  if (name == "count") result = LostCount();
  if (name == "deadlock") result = Deadlock(&first, &second);
  if (name == "hours") result = Hours();
  if (name == "random") result = absl::StrCat(std::random_device()());
  *course = End();
  return result;
}

TEST_F(SchedulerTest, TheSameSeedGivesTheSameOrder) {
  std::vector<std::string> counts;
  for (int seed = 0; seed < 10; ++seed) {
    const Outcome one = runner->Run(absl::StrCat("count ", seed));
    const Outcome other = runner->Run(absl::StrCat("count ", seed));
    EXPECT_EQ(one.wrong, other.wrong) << "seed " << seed;
    EXPECT_EQ(one.course.hash, other.course.hash) << "seed " << seed;
    counts.push_back(one.wrong);
  }
  // Some order loses something, and not all orders lose the same.
  std::sort(counts.begin(), counts.end());
  EXPECT_NE(counts.front(), "20");
  EXPECT_NE(counts.front(), counts.back());
}

TEST_F(SchedulerTest, WhoWaitsForEverIsFound) {
  const Outcome outcome = runner->Run("deadlock 1");
  EXPECT_EQ(outcome.wrong, "threads wait for each other for ever");
  EXPECT_NE(outcome.printed.find("waits for futex"), std::string::npos) << outcome.printed;
}

TEST_F(SchedulerTest, TimeIsThatOfTheSimulation) {
  const auto begin = Steady::now();
  for (int seed = 0; seed < 10; ++seed) {
    EXPECT_EQ(runner->Run(absl::StrCat("hours ", seed)).wrong, "") << "seed " << seed;
  }
  EXPECT_LT(Steady::now() - begin, std::chrono::hours(1));
}

TEST_F(SchedulerTest, ChanceIsTheSeeds) {
  EXPECT_EQ(runner->Run("random 1").wrong, runner->Run("random 1").wrong);
  EXPECT_NE(runner->Run("random 1").wrong, runner->Run("random 2").wrong);
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  using distgrad::simulation::Runner;
  Runner::FixAddresses(argv);
  ::testing::InitGoogleTest(&argc, argv);
  Runner runner(distgrad::simulation::Scenario, [] {});
  distgrad::simulation::runner = &runner;
  return RUN_ALL_TESTS();
}
