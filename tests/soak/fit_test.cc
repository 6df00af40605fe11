// The line finds leaks that were planted, and none where there are none.
#include "tests/soak/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace distgrad {
namespace {

// What a process of a soak of an hour might say every ten seconds of its memory, in MB; x in hours.
struct Series {
  double leak = 0;         // MB in an hour
  double noise = 1;        // what its memory goes up and down by
  double persistence = 0;  // how much of that is still there at the next point
};
std::vector<Point> Measure(const Series& series, std::mt19937_64& random) {
  std::normal_distribution<double> normal(0, series.noise);
  std::vector<Point> points;
  double noise = 0;
  for (int i = 0; i < 290; ++i) {
    const double hours = (70 + i) * 10 / 3600.0;
    noise = series.persistence * noise +
            std::sqrt(1 - series.persistence * series.persistence) * normal(random);
    points.push_back({hours, 200 + series.leak * hours + noise});
  }
  return points;
}
// How many of 1000 such series are judged so.
int Count(Growth growth, const Series& series, double bound, double resolution) {
  std::mt19937_64 random(7);
  int count = 0;
  for (int i = 0; i < 1000; ++i)
    count += JudgeGrowth(FitLine(Measure(series, random)), bound, resolution) == growth;
  return count;
}
int CountGrowing(const Series& series, double bound) {
  return Count(Growth::kGrows, series, bound, bound);
}

TEST(FitTest, ALineIsFoundExactly) {
  std::vector<Point> points;
  for (int i = 0; i < 100; ++i) points.push_back({i / 10.0, 3 + 0.5 * i / 10.0});
  const Fit fit = FitLine(points);
  EXPECT_EQ(fit.points, 100);
  EXPECT_NEAR(fit.slope, 0.5, 1e-12);
  EXPECT_NEAR(fit.mean, 3 + 0.5 * 4.95, 1e-12);
  EXPECT_NEAR(fit.error, 0, 1e-9);
  EXPECT_EQ(JudgeGrowth(fit, 0.4, 0.1), Growth::kGrows);
  EXPECT_EQ(JudgeGrowth(fit, 0.6, 0.1), Growth::kNone);
}

TEST(FitTest, TheErrorIsThatOfTheTextbook) {
  // y = x, and 1 more and 1 less by turns: residuals whose neighbours are not alike.
  std::vector<Point> points;
  for (int i = 0; i < 8; ++i) points.push_back({1.0 * i, i + (i % 2 == 0 ? 1.0 : -1.0)});
  const Fit fit = FitLine(points);
  // By hand: slope = 1 - 4/42; the sum of the squared residuals is 8 - 16/42, and of x's 42.
  EXPECT_NEAR(fit.slope, 1 - 4 / 42.0, 1e-12);
  EXPECT_NEAR(fit.error, std::sqrt((8 - 16 / 42.0) / 6 / 42), 1e-12);
}

TEST(FitTest, APlantedLeakIsFound) {
  // 10 bytes for each of 1000 calls a second.
  EXPECT_EQ(CountGrowing({.leak = 36}, 20), 1000);
  EXPECT_EQ(CountGrowing({.leak = 36, .noise = 2, .persistence = 0.9}, 20), 1000);
  // One descriptor in a minute, among some that come and go.
  EXPECT_GE(CountGrowing({.leak = 60, .noise = 8, .persistence = 0.5}, 12), 990);
}

TEST(FitTest, WhereThereIsNoneItFindsNone) {
  for (const double persistence : {0.0, 0.5, 0.9}) {
    EXPECT_LE(CountGrowing({.noise = 5, .persistence = persistence}, 0), 20) << persistence;
  }
  EXPECT_EQ(CountGrowing({.leak = 10, .persistence = 0.5}, 20), 0);
  EXPECT_EQ(CountGrowing({.leak = -36}, 0), 0);
}

// A leak of twice the bound and more, which is lost in the noise, is not said to be none.
TEST(FitTest, ANoisySeriesIsNotJudged) {
  const Series noisy = {.leak = 50, .noise = 40, .persistence = 0.9};
  EXPECT_LT(Count(Growth::kGrows, noisy, 20, 20), 500);
  EXPECT_LE(Count(Growth::kNone, noisy, 20, 20), 10);
  EXPECT_GE(Count(Growth::kTooNoisy, {.noise = 40, .persistence = 0.9}, 20, 20), 900);
  // The least leak that is not to pass.
  EXPECT_LE(Count(Growth::kNone, {.leak = 40, .noise = 12, .persistence = 0.5}, 20, 20), 20);
  EXPECT_GE(Count(Growth::kNone, {.leak = 20, .noise = 4, .persistence = 0.5}, 20, 20), 980);
  EXPECT_EQ(JudgeGrowth({.points = 100, .slope = std::nan(""), .error = std::nan("")}, 20, 20),
            Growth::kTooNoisy);
}

TEST(FitTest, ItSaysNothingOfAFewPoints) {
  EXPECT_EQ(JudgeGrowth(FitLine({}), 0, 1), Growth::kTooNoisy);
  std::vector<Point> points;
  for (size_t i = 0; i + 1 < kFewestPoints; ++i) {
    points.push_back({1.0 * i, 100.0 * i});
    EXPECT_EQ(JudgeGrowth(FitLine(points), 0, 1), Growth::kTooNoisy);
  }
  points.push_back({1.0 * kFewestPoints, 100.0 * kFewestPoints});
  EXPECT_EQ(JudgeGrowth(FitLine(points), 0, 1), Growth::kGrows);
}

}  // namespace
}  // namespace distgrad
