#include "core/base/log.h"

#include <string>

#include "core/base/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using internal::LogSeverity;
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

TEST(CheckDeathTest, SaysWhereAndWhat) {
  int evaluated = 0;
  DG_CHECK(true) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
  EXPECT_DEATH(DG_CHECK(1 + 1 == 3) << "sum " << 2,
               "log_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3 sum 2");
}

}  // namespace
}  // namespace distgrad
