// The table, the picture, and what is said where gnuplot is missing or fails.
#include "examples/report.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::HasSubstr;

std::string Folder(const std::string& name) {
  return absl::StrCat(getenv("TEST_TMPDIR"), "/", name);
}

std::string Contents(const std::string& path) {
  std::ifstream in(path);
  return std::string((std::istreambuf_iterator<char>(in)), {});
}

TEST(ReportTest, WritesEachRowAtOnce) {
  Report report = *Report::Create(Folder("new/one"));
  ReportRow training;
  training.epoch = 0.5;
  training.step = 10;
  training.seconds = 1.25;
  training.items_per_second = 8000;
  training.train_loss = 0.75;
  EXPECT_TRUE(report.Add(training).ok());
  ReportRow test;
  test.epoch = 1;
  test.step = 20;
  test.seconds = 2.5;
  test.items_per_second = 8000;
  test.test_loss = 0.5;
  test.test_accuracy = 0.875;
  EXPECT_TRUE(report.Add(test).ok());
  EXPECT_EQ(Contents(report.table_path()),
            "epoch,step,seconds,images_per_second,train_loss,test_loss,test_accuracy\n"
            "0.5000,10,1.250,8000,0.75,,\n"
            "1.0000,20,2.500,8000,,0.5,0.875\n");
}

TEST(ReportTest, KeepsTheFirstStepsOfARunThatGoesOn) {
  {
    Report report = *Report::Create(Folder("goes on"));
    for (const int64_t step : {10, 20, 30}) {
      ReportRow row;
      row.step = step;
      EXPECT_TRUE(report.Add(row).ok());
    }
  }
  Report report = *Report::Create(Folder("goes on"), {}, 20);
  ReportRow row;
  row.step = 25;
  EXPECT_TRUE(report.Add(row).ok());
  EXPECT_EQ(Contents(report.table_path()),
            "epoch,step,seconds,images_per_second,train_loss,test_loss,test_accuracy\n"
            "0.0000,10,0.000,0,,,\n"
            "0.0000,20,0.000,0,,,\n"
            "0.0000,25,0.000,0,,,\n");
}

TEST(ReportTest, SaysWhereItCannotWrite) {
  std::ofstream(Folder("file")) << "in the way";
  const absl::Status status = Report::Create(Folder("file")).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(Folder("file")));
}

// A gnuplot of our own: `script` with what it was asked in $3.
void InstallGnuplot(const std::string& folder, const std::string& script) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/gnuplot") << "#!/bin/sh\n" << script;
  chmod((folder + "/gnuplot").c_str(), 0700);
  setenv("PATH", absl::StrCat(folder, ":/usr/bin:/bin").c_str(), 1);
}

TEST(ReportTest, AsksGnuplotForThePicture) {
  const Report report = *Report::Create(Folder("it's here"));
  InstallGnuplot(Folder("good"), absl::StrCat("printf '%s' \"$3\" >'", Folder("asked"), "'\n"));
  EXPECT_TRUE(report.Draw("a 'title'").ok());
  const std::string asked = Contents(Folder("asked"));
  EXPECT_THAT(asked, HasSubstr("title 'a ''title'''"));
  EXPECT_THAT(asked,
              HasSubstr(absl::StrCat("set output '", Folder("it''s here/training.svg"), "'")));
}

TEST(ReportTest, LeavesNoHalfPicture) {
  const Report report = *Report::Create(Folder("half"));
  InstallGnuplot(Folder("bad"),
                 absl::StrCat("echo '<svg' >'", report.picture_path(), "'\nexit 1\n"));
  EXPECT_EQ(report.Draw("t").code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(std::filesystem::exists(report.picture_path()));
}

TEST(ReportTest, SaysThatGnuplotIsMissing) {
  setenv("PATH", "/nowhere", 1);
  const absl::Status status = Report::Create(Folder("none"))->Draw("t");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gnuplot-nox"));
}

TEST(ReportTest, DrawsWithTheRealGnuplot) {
  setenv("PATH", "/usr/local/bin:/usr/bin:/bin", 1);
  Report report = *Report::Create(Folder("real"));
  ReportRow row;
  row.epoch = 1;
  row.train_loss = 1;
  ASSERT_TRUE(report.Add(row).ok());
  row.epoch = 2;
  row.test_loss = 0.5;
  row.test_accuracy = 0.9;
  ASSERT_TRUE(report.Add(row).ok());
  const absl::Status status = report.Draw("a title");
  if (status.code() == absl::StatusCode::kUnavailable) GTEST_SKIP() << status.message();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(Contents(report.picture_path()), HasSubstr("a title"));
}

}  // namespace
}  // namespace distgrad
