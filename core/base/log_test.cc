// Lines of the log: their format, the threshold, and sinks that come and go.
#include "core/base/log.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "core/base/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/fail_allocation.h"

namespace distgrad {
namespace {

using internal::ParseLogSeverity;

TEST(LogTest, Severities) {
  EXPECT_EQ(ParseLogSeverity("INFO"), LogSeverity::kINFO);
  EXPECT_EQ(ParseLogSeverity("error"), LogSeverity::kERROR);
  EXPECT_EQ(ParseLogSeverity("OFF"), LogSeverity::kOFF);
  EXPECT_EQ(ParseLogSeverity(""), LogSeverity::kWARNING);
  EXPECT_EQ(ParseLogSeverity("verbose"), LogSeverity::kWARNING);
}

TEST(LogTest, OneLineFromTheThresholdOn) {
  // DISTGRAD_LOG is not set in a test.
  testing::internal::CaptureStderr();
  int evaluated = 0;
  if (evaluated == 0) DG_LOG(INFO) << "not this " << ++evaluated;
  DG_LOG(WARNING) << "but this " << 7;
  DG_LOG(ERROR) << "and this";
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(evaluated, 0);
  EXPECT_THAT(text, testing::MatchesRegex("W [-0-9T:.]+Z [^\n]*log_test.cc:[0-9]+\\] but this 7\n"
                                          "E [-0-9T:.]+Z [^\n]*log_test.cc:[0-9]+\\] and this\n"));
}

// Its destructor would end the process.
TEST(LogTest, WithoutMemoryTheLineIsLost) {
  testing::internal::CaptureStderr();
  bool failed = true;
  for (int nth = 0; failed; ++nth) {
    FailAllocation(nth);
    DG_LOG(WARNING) << "of more characters than a std::string has without memory of its own";
    failed = FailAllocation(-1);
  }
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::EndsWith("memory of its own\n"));
}

// It is read once, so each value needs a process of its own.
TEST(LogDeathTest, TheEnvironmentSaysFromWhichSeverityOn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  struct {
    const char* value;
    const char* lines;  // their first letters
  } const cases[] = {{"INFO", "IWE"}, {"WARNING", "WE"}, {"ERROR", "E"}, {"OFF", ""}};
  for (const auto& [value, lines] : cases) {
    std::string expected = "^";
    for (const char* letter = lines; *letter != 0; ++letter) {
      expected += std::string(1, *letter) + " [^\n]*\\] a line\n";
    }
    EXPECT_EXIT(
        {
          setenv("DISTGRAD_LOG", value, 1);
          DG_LOG(INFO) << "a line";
          DG_LOG(WARNING) << "a line";
          DG_LOG(ERROR) << "a line";
          std::exit(0);
        },
        testing::ExitedWithCode(0), testing::MatchesRegex(expected + "$"))
        << value;
  }
}

TEST(LogSinkTest, TakesTheLines) {
  std::vector<std::pair<LogSeverity, std::string>> lines;
  const auto held = std::make_shared<int>();
  testing::internal::CaptureStderr();
  SetLogSink([&lines, held](LogSeverity severity, absl::string_view text) {
    lines.emplace_back(severity, text);
    if (text == "throw") throw 1;
    DG_LOG(ERROR) << "logged by the sink";
  });
  DG_LOG(INFO) << "below the threshold";
  DG_LOG(WARNING) << "one " << 1;
  DG_LOG(ERROR) << "throw";
  EXPECT_GT(held.use_count(), 1);
  SetLogSink(nullptr);
  EXPECT_EQ(held.use_count(), 1);
  DG_LOG(ERROR) << "again";
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(lines, testing::ElementsAre(testing::Pair(LogSeverity::kWARNING, "one 1"),
                                          testing::Pair(LogSeverity::kERROR, "throw")));
  EXPECT_THAT(text, testing::MatchesRegex("E [^\n]*\\] logged by the sink\n"
                                          "E [^\n]*\\] throw\n"
                                          "E [^\n]*\\] again\n"));
}

TEST(LogSinkTest, WhoTakesItOffWaitsForIt) {
  absl::Notification entered, release;
  bool over = false;  // without a lock: what is waited for has happened before
  SetLogSink([&](LogSeverity, absl::string_view) {
    entered.Notify();
    release.WaitForNotification();
    over = true;
  });
  std::thread logs([] { DG_LOG(ERROR) << "slow"; });
  entered.WaitForNotification();
  std::thread releases([&] { release.Notify(); });
  SetLogSink(nullptr);
  EXPECT_TRUE(over);
  logs.join();
  releases.join();
}

TEST(LogSinkTest, ASinkMayTakeItselfOff) {
  const auto held = std::make_shared<int>();
  int lines = 0;
  SetLogSink([&lines, held](LogSeverity, absl::string_view) {
    ++lines;
    SetLogSink(nullptr);
    EXPECT_GT(held.use_count(), 1) << "what runs is there";
  });
  DG_LOG(ERROR) << "once";
  EXPECT_EQ(held.use_count(), 1);
  DG_LOG(ERROR) << "to standard error";
  EXPECT_EQ(lines, 1);
}

TEST(LogSinkTest, FromManyThreads) {
  std::atomic<int> lines{0};
  std::vector<std::thread> threads;
  SetLogSink([&](LogSeverity, absl::string_view) { ++lines; });
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < 100; ++k) DG_LOG(ERROR) << k;
    });
    threads.emplace_back([&] {
      for (int k = 0; k < 100; ++k) SetLogSink([&](LogSeverity, absl::string_view) { ++lines; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink(nullptr);
  EXPECT_EQ(lines, 400);
}

TEST(CheckDeathTest, SaysWhereAndWhat) {
  int evaluated = 0;
  DG_CHECK(true) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
  EXPECT_DEATH(DG_CHECK(1 + 1 == 3) << "sum " << 2,
               "log_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3 sum 2");
}

}  // namespace
}  // namespace distgrad
