// Order, time and chance by the seed, and threads that wait for ever.
#include "tests/simulation/scheduler.h"

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/simulation/runner.h"
#include "tests/simulation/runner_tests.h"

namespace distgrad::simulation {
namespace {

using ::testing::HasSubstr;
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
    pthread_setname_np(pthread_self(), "takes");
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

// Says of its thread where it has been, and its destructor that it has ended.
struct OfThread {
  ~OfThread() {
    if (where != nullptr) absl::StrAppend(where, name, " ends\n");
  }
  std::string* where = nullptr;
  std::string name;
};
thread_local OfThread of_thread;

// What belongs to a thread stays with it while others run: variables, errno, rounding, and what is
// being thrown.
std::string ThreadLocals() {
  std::string where;
  std::mutex mu;
  const auto run = [&](const std::string& name, int rounding) {
    of_thread.where = &where;
    of_thread.name = name;
    std::fesetround(rounding);
    for (int i = 0; i < 5; ++i) {
      errno = i;
      try {
        throw std::runtime_error(absl::StrCat(name, " ", i));
      } catch (const std::exception& error) {
        { std::lock_guard<std::mutex> lock(mu); }
        absl::SleepFor(absl::Milliseconds(1));
        volatile double third = 1;
        third = third / 3;
        absl::StrAppend(&where, of_thread.name, ": ", error.what(), ", errno ", errno, ", ",
                        absl::StrFormat("%.20f", third), " ", std::fegetround(), "\n");
      }
    }
  };
  std::thread a(run, "a", FE_UPWARD), b(run, "b", FE_DOWNWARD);
  a.join();
  b.join();
  return where;
}

// Whether two threads are the same one to the system.
std::string Tids() {
  long first = 0, second = 0;
  std::thread([&] { first = syscall(SYS_gettid); }).join();
  std::thread([&] { second = syscall(SYS_gettid); }).join();
  return first == second && first == syscall(SYS_gettid) ? "one" : "several";
}

// A process that is stopped for an hour: how often its threads, and this one, have gone on in the
// half of it.
std::string Stopped() {
  std::mutex mu;
  int locked = 0, unlocked = 0;
  std::thread a, b;
  {
    const InProcess in_process(1);
    a = std::thread([&] {
      for (int i = 0; i < 10; ++i) {
        std::lock_guard<std::mutex> lock(mu);
        absl::SleepFor(absl::Minutes(6));
        ++locked;
      }
    });
    b = std::thread([&] {
      for (int i = 0; i < 10; ++i, ++unlocked) absl::SleepFor(absl::Minutes(6));
    });
  }
  absl::SleepFor(absl::Minutes(1));
  StopProcess(1, Now() + int64_t{3600} * 1000000000);
  absl::SleepFor(absl::Minutes(30));
  std::string counts;
  {
    std::lock_guard<std::mutex> lock(mu);  // which is free
    counts = absl::StrCat(locked, " with a lock, ", unlocked, " without");
  }
  const int64_t own = LastStopOfProcess();
  a.join();
  b.join();
  return absl::StrCat(counts, "; ", locked, " and ", unlocked, " in the end",
                      own == 0 ? "" : "; this one was stopped, too");
}

std::string Scenario(absl::string_view order, Course* course) {
  const std::vector<absl::string_view> words = absl::StrSplit(order, ' ');
  const absl::string_view name = words[0];
  Schedule schedule;
  if (!absl::SimpleAtoi(words[1], &schedule.seed)) return "no seed";
  schedule.fibers = words.size() == 2;
  schedule.preempt_one_in = 4;
  schedule.time_limit = int64_t{24} * 3600 * 1000000000;
  absl::Mutex first, second;
  Begin(schedule);
  std::string result;
  if (name == "count") result = LostCount();
  if (name == "deadlock") result = Deadlock(&first, &second);
  if (name == "hours") result = Hours();
  if (name == "tids") result = Tids();
  if (name == "locals") result = ThreadLocals();
  if (name == "stopped") result = Stopped();
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

TEST_F(SchedulerTest, FibersRunAsThreadsDo) {
  for (const char* const name : {"count", "hours", "locals", "random"}) {
    for (int seed = 0; seed < 5; ++seed) {
      const std::string order = absl::StrCat(name, " ", seed);
      const Outcome fibers = runner->Run(order);
      const Outcome threads = runner->Run(absl::StrCat(order, " threads"));
      EXPECT_EQ(fibers.wrong, threads.wrong) << order;
      EXPECT_EQ(fibers.course.hash, threads.course.hash) << order;
      EXPECT_EQ(fibers.course.threads, threads.course.threads) << order;
    }
  }
}

// Else nobody would notice that they do not.
TEST_F(SchedulerTest, FibersShareAThreadWhereTheSystemLetsThem) {
#ifdef __x86_64__
  constexpr unsigned long kFsgsbase = 2;  // HWCAP2_FSGSBASE of <asm/hwcap2.h>
  const bool share = (getauxval(AT_HWCAP2) & kFsgsbase) != 0;
#else
  const bool share = false;
#endif
  EXPECT_EQ(runner->Run("tids 1").wrong, share ? "one" : "several");
  EXPECT_EQ(runner->Run("tids 1 threads").wrong, "several");
}

TEST_F(SchedulerTest, WhatBelongsToAThreadStaysWithIt) {
  const std::string where = runner->Run("locals 3").wrong;
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(where, HasSubstr(absl::StrCat("a: a ", i, ", errno ", i,
                                              ", 0.33333333333333337034 ", FE_UPWARD, "\n")));
    EXPECT_THAT(where, HasSubstr(absl::StrCat("b: b ", i, ", errno ", i,
                                              ", 0.33333333333333331483 ", FE_DOWNWARD, "\n")));
  }
  EXPECT_THAT(where, HasSubstr("a ends\n"));
  EXPECT_THAT(where, HasSubstr("b ends\n"));
}

TEST_F(SchedulerTest, WhoWaitsForEverIsFound) {
  for (const char* const order : {"deadlock 1", "deadlock 1 threads"}) {
    const Outcome outcome = runner->Run(order);
    EXPECT_EQ(outcome.wrong, "threads wait for each other for ever") << order;
    // The two, with the names and stacks of their threads, and the one that waits for them.
    EXPECT_THAT(outcome.printed, HasSubstr("thread 1 'takes': waits for futex")) << order;
    EXPECT_THAT(outcome.printed, HasSubstr("thread 2 'takes': waits for futex")) << order;
    EXPECT_THAT(outcome.printed, HasSubstr("waits for thread's end")) << order;
    EXPECT_THAT(outcome.printed, HasSubstr("absl")) << order;
  }
}

TEST_F(SchedulerTest, TimeIsThatOfTheSimulation) {
  const auto begin = Steady::now();
  for (int seed = 0; seed < 10; ++seed) {
    EXPECT_EQ(runner->Run(absl::StrCat("hours ", seed)).wrong, "") << "seed " << seed;
  }
  EXPECT_LT(Steady::now() - begin, std::chrono::hours(1));
}

TEST_F(SchedulerTest, AProcessThatIsStoppedGivesItsLocksBackAndGoesOnLater) {
  for (int seed = 0; seed < 10; ++seed) {
    const Outcome outcome = runner->Run(absl::StrCat("stopped ", seed));
    EXPECT_EQ(outcome.wrong, "1 with a lock, 0 without; 10 and 10 in the end") << "seed " << seed;
    EXPECT_GT(outcome.course.time, int64_t{2 * 3600 - 7 * 60} * 1000000000) << "seed " << seed;
  }
}

TEST_F(SchedulerTest, ChanceIsTheSeeds) {
  EXPECT_EQ(runner->Run("random 1").wrong, runner->Run("random 1").wrong);
  EXPECT_NE(runner->Run("random 1").wrong, runner->Run("random 2").wrong);
}

}  // namespace
}  // namespace distgrad::simulation

int main(int argc, char** argv) {
  namespace simulation = distgrad::simulation;
  return simulation::RunTests(
      argc, argv, simulation::Scenario, [] {}, &simulation::runner);
}
