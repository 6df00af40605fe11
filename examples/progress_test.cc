// What is drawn on a terminal, and what is written elsewhere.
#include "examples/progress.h"

#include <string>

#include "gtest/gtest.h"

namespace distgrad {
namespace {

class ProgressBarTest : public ::testing::Test {
 protected:
  Screen MakeScreen(bool terminal) {
    return {terminal, [this] { return columns_; }, [this](absl::string_view s) { text_.append(s); },
            [this] { return now_; }};
  }
  std::string TakeText() { return std::exchange(text_, ""); }

  int columns_ = 80;
  std::string text_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(ProgressBarTest, FillsTheWidthOfTheTerminal) {
  ProgressBar bar(MakeScreen(true), 1000);
  bar.SetLabel("epoch 1/2");
  now_ += absl::Seconds(2);
  bar.Update(500, 0.25, 250);
  EXPECT_EQ(TakeText(),
            "\r\x1b[Kepoch 1/2 [==========>            ]  50 %  loss 0.2500  250 images/s  "
            "0:02 left");
  columns_ = 60;
  now_ += absl::Seconds(1);
  bar.Update(750, 0.125, 250);
  EXPECT_EQ(TakeText(), "\r\x1b[Kepoch 1/2  75 %  loss 0.1250  250 images/s  0:01 left");
  columns_ = 20;
  now_ += absl::Seconds(1);
  bar.Update(1000, 0.125, 250);
  EXPECT_EQ(TakeText(), "\r\x1b[Kepoch 1/2 100 %  lo");
  bar.Close();
  EXPECT_EQ(TakeText(), "\r\x1b[K");
  bar.Close();
  EXPECT_EQ(TakeText(), "");
}

TEST_F(ProgressBarTest, DrawsTenTimesASecondAtMost) {
  ProgressBar bar(MakeScreen(true), 1000);
  for (int i = 1; i <= 100; ++i) {
    now_ += absl::Milliseconds(10);
    bar.Update(i, 1, 100);
  }
  int lines = 0;
  for (const char c : TakeText()) lines += c == '\r';
  EXPECT_EQ(lines, 10);
}

TEST_F(ProgressBarTest, KeepsPrintedLinesAboveTheBar) {
  ProgressBar bar(MakeScreen(true), 100);
  columns_ = 10;
  bar.Print("before");
  EXPECT_EQ(TakeText(), "before\n");
  now_ += absl::Seconds(1);
  bar.Update(10, 1, 10);
  TakeText();
  bar.Print("done");
  EXPECT_EQ(TakeText(), "\r\x1b[Kdone\n\r\x1b[K  10 %  l");
}

TEST_F(ProgressBarTest, WhatWasDoneBeforeTookNoneOfItsTime) {
  ProgressBar bar(MakeScreen(true), 1000, "tokens", 600);
  now_ += absl::Seconds(10);
  // Eight of the ten seconds were for something else, as more of them will be.
  bar.Update(700, 0.5, 50);
  EXPECT_EQ(TakeText(),
            "\r\x1b[K [======================>          ]  70 %  loss 0.5000  50 tokens/s  "
            "0:30 left");
}

TEST_F(ProgressBarTest, WritesPlainLinesElsewhere) {
  ProgressBar bar(MakeScreen(false), 100'000);
  bar.SetLabel("epoch 1/1");
  for (int second = 1; second < 20; ++second) {
    now_ += absl::Seconds(1);
    bar.Update(second, 2.5, 1);
  }
  EXPECT_EQ(TakeText(), "epoch 1/1   0 %  loss 2.5000  1 images/s  27:46:30 left\n");
  bar.Print("a line");
  bar.Close();
  EXPECT_EQ(TakeText(), "a line\n");
}

}  // namespace
}  // namespace distgrad
