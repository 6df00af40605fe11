// The learning rates of a run's steps, and its speed.
#include "examples/training_loop.h"

#include <stdlib.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace distgrad {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

// Keeps the learning rates that it is given.
class RecordingTask : public TrainingTask {
 public:
  absl::Status Start(double learning_rate) override {
    learning_rates.push_back(learning_rate);
    return absl::OkStatus();
  }
  int most_in_flight() const override { return 2; }
  absl::StatusOr<StepResult> Finish() override { return StepResult{/*loss=*/1, /*items=*/1}; }
  absl::StatusOr<Evaluation> Evaluate() override {
    absl::SleepFor(evaluation_takes);
    return Evaluation{};
  }
  bool interrupted() const override { return false; }

  std::vector<double> learning_rates;
  absl::Duration evaluation_takes;
};

TrainingPlan EightSteps(double warm_up) {
  return {.steps = 8,
          .steps_per_round = 4,
          .label = [](int64_t) { return "round"; },
          .items = [](int64_t steps) { return steps; },
          .items_per_epoch = 4,
          .warm_up = warm_up};
}

// Those of the steps behind so many.
std::vector<double> LearningRates(double warm_up, int64_t behind = 0) {
  Options options;
  options.learning_rate = 2;
  TrainingLoop loop =
      *TrainingLoop::Create(options, EightSteps(warm_up), {}, TrainingLoop::Role::kFollow);
  if (behind > 0) {
    EXPECT_EQ(loop.Resume(behind), absl::OkStatus());
  }
  RecordingTask task;
  EXPECT_EQ(loop.Run(task, nullptr), absl::OkStatus());
  return task.learning_rates;
}

TEST(TrainingLoopTest, LearningRateRisesInTheFirstStepsAndFallsTo0) {
  EXPECT_THAT(LearningRates(/*warm_up=*/0.5),
              ElementsAre(DoubleEq(2 * 1 / 4. * 8 / 8), DoubleEq(2 * 2 / 4. * 7 / 8),
                          DoubleEq(2 * 3 / 4. * 6 / 8), DoubleEq(2 * 5 / 8.), DoubleEq(2 * 4 / 8.),
                          DoubleEq(2 * 3 / 8.), DoubleEq(2 * 2 / 8.), DoubleEq(2 * 1 / 8.)));
}

TEST(TrainingLoopTest, WithoutAWarmUpTheFirstStepHasTheHighestLearningRate) {
  EXPECT_THAT(LearningRates(/*warm_up=*/0).front(), DoubleEq(2));
}

TEST(TrainingLoopTest, ARunThatGoesOnHasTheLearningRatesOfOneThatDidNotStop) {
  const std::vector<double> all = LearningRates(/*warm_up=*/0.5);
  EXPECT_THAT(LearningRates(/*warm_up=*/0.5, /*behind=*/2),
              ElementsAreArray(all.begin() + 2, all.end()));
}

// Those of short runs would be that of the evaluations, which are the same with any pipeline.
TEST(TrainingLoopTest, EvaluationsDoNotCountInTheSpeed) {
  Options options;
  options.output = absl::StrCat(getenv("TEST_TMPDIR"), "/speed");
  TrainingLoop loop =
      *TrainingLoop::Create(options, EightSteps(/*warm_up=*/0), {}, TrainingLoop::Role::kLead);
  RecordingTask task;
  task.evaluation_takes = absl::Milliseconds(500);
  ASSERT_EQ(loop.Run(task, nullptr), absl::OkStatus());
  const double seconds = loop.seconds();
  EXPECT_GE(seconds, 1) << "two evaluations";
  EXPECT_GT(loop.items_per_second() * seconds, 8);
}

}  // namespace
}  // namespace distgrad
