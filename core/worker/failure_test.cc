// The error file that torchrun reads, and processes that have none.
#include "core/worker/failure.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using testing::MatchesRegex;

class ReportFailureTest : public testing::Test {
 protected:
  ReportFailureTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    setenv("TORCHELASTIC_ERROR_FILE", path_.c_str(), 1);
  }
  ~ReportFailureTest() override { unsetenv("TORCHELASTIC_ERROR_FILE"); }

  std::string Report() const {
    std::ifstream file(path_);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  const std::string folder_ = testing::TempDir() + "/report";
  const std::string path_ = folder_ + "/error.json";
};

TEST_F(ReportFailureTest, AsTorchrunReadsIt) {
  EXPECT_TRUE(ReportFailure(absl::UnavailableError("\"back\" is gone\n\x1b\xc3\\")).ok());
  EXPECT_THAT(Report(), MatchesRegex(R"(\{"message": \{"message": "UNAVAILABLE: \\"back\\" is gone)"
                                     R"(\\n\\\\x1b\\\\xc3\\\\", "extraInfo": \{"timestamp": )"
                                     "\"[0-9]+\"\\}\\}\\}\n"));
  // Nothing else lies there, and what comes later does not hide the cause.
  EXPECT_TRUE(ReportFailure(absl::InternalError("a consequence")).ok());
  EXPECT_FALSE(absl::StrContains(Report(), "consequence"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

// torchrun shows the earliest, and among those of one second the lowest rank's.
TEST_F(ReportFailureTest, ConsequencesComeAfterTheirCause) {
  const auto reported_at = [&](const absl::Status& failure) {
    std::filesystem::remove(path_);
    EXPECT_TRUE(ReportFailure(failure).ok());
    const std::string mark = "\"timestamp\": \"";
    const std::string report = Report();
    return std::stoll(report.substr(report.find(mark) + mark.size()));
  };
  for (const absl::Status& consequence : {absl::UnavailableError("worker 'back' is gone"),
                                          absl::CancelledError("a pass was aborted")}) {
    const int64_t before = absl::ToUnixSeconds(absl::Now());
    const int64_t reported = reported_at(consequence);
    EXPECT_GE(reported, before + 2);
    EXPECT_LE(reported, absl::ToUnixSeconds(absl::Now()) + 2);
  }
  const int64_t before = absl::ToUnixSeconds(absl::Now());
  const int64_t cause = reported_at(absl::InternalError("it was me"));
  EXPECT_GE(cause, before);
  EXPECT_LE(cause, absl::ToUnixSeconds(absl::Now()));
}

TEST_F(ReportFailureTest, NothingToReport) {
  EXPECT_TRUE(ReportFailure(absl::OkStatus()).ok());
  unsetenv("TORCHELASTIC_ERROR_FILE");
  EXPECT_TRUE(ReportFailure(absl::InternalError("unseen")).ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(ReportFailureTest, NowhereToWrite) {
  setenv("TORCHELASTIC_ERROR_FILE", "/no/such/folder/error.json", 1);
  const absl::Status status = ReportFailure(absl::InternalError("x"));
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
}

}  // namespace
}  // namespace distgrad
