// Plans and parcels as bytes and back, and those that are refused.
#include "core/pipeline/step_plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>

namespace distgrad {
namespace {

StepPlan SomePlan() {
  return {.step = 7,
          .follows = 5,
          .rank = 1,
          .micro_batches = 3,
          .backward = true,
          .has_targets = true,
          .rank_of_stage = {0, 1},
          .workers = {"front", "back"},
          .list = OneForwardOneBackward(2, 3)->lists[1],
          .weights = {0.5, 0.25, 0.25}};
}

TEST(StepPlanTest, APlanIsReadAsItWasWritten) {
  const StepPlan plan = SomePlan();
  const absl::StatusOr<StepPlan> read = DecodePlan(EncodePlan(plan));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->step, plan.step);
  EXPECT_EQ(read->follows, plan.follows);
  EXPECT_EQ(read->rank, plan.rank);
  EXPECT_EQ(read->micro_batches, plan.micro_batches);
  EXPECT_EQ(read->backward, plan.backward);
  EXPECT_EQ(read->has_targets, plan.has_targets);
  EXPECT_EQ(read->rank_of_stage, plan.rank_of_stage);
  EXPECT_EQ(read->workers, plan.workers);
  EXPECT_TRUE(read->list == plan.list);
  EXPECT_EQ(read->weights, plan.weights);
}

TEST(StepPlanTest, AParcelIsReadAsItWasWritten) {
  const Parcel parcel{.to = {7, 1},
                      .kind = Parcel::Kind::kGradient,
                      .stage = 1,
                      .micro_batch = 2,
                      .wanted = {true, false}};
  const absl::StatusOr<Parcel> read = DecodeParcel(EncodeParcel(parcel));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->to.step, 7u);
  EXPECT_EQ(read->to.first_stage, 1);
  EXPECT_EQ(read->kind, Parcel::Kind::kGradient);
  EXPECT_EQ(read->stage, 1);
  EXPECT_EQ(read->micro_batch, 2);
  EXPECT_EQ(read->wanted, parcel.wanted);
  const absl::StatusOr<StepRef> ref = DecodeStepRef(EncodeStepRef({9, 3}));
  ASSERT_TRUE(ref.ok()) << ref.status();
  EXPECT_EQ(ref->step, 9u);
  EXPECT_EQ(ref->first_stage, 3);
  const std::string bytes = EncodeEnd({.of = {9, 3}, .averager = 11});
  const absl::StatusOr<StepEnd> end = DecodeEnd(bytes);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->of.step, 9u);
  EXPECT_EQ(end->of.first_stage, 3);
  EXPECT_EQ(end->averager, 11u);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeEnd(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeEnd(bytes + "x").ok());
}

TEST(StepPlanTest, TiesAreReadAsTheyWereWritten) {
  for (const TieNames& names : {TieNames{}, TieNames{"a", ""}}) {
    for (const uint64_t averager : {uint64_t{0}, ~uint64_t{0}}) {
      const absl::StatusOr<Begun> read =
          DecodeBegun(EncodeBegun({.names = names, .averager = averager}));
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->names, names);
      EXPECT_EQ(read->averager, averager);
    }
  }
  const Ties ties{{7, 1}, {{"a", {0, 2}}, {"b", {1, 3, 4}}}, "front"};
  const std::string bytes = EncodeTies(ties);
  const absl::StatusOr<Ties> read = DecodeTies(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->to.step, 7u);
  EXPECT_EQ(read->to.first_stage, 1);
  EXPECT_EQ(read->ranks, ties.ranks);
  EXPECT_EQ(read->averages, "front");
  EXPECT_FALSE(DecodeTies(EncodeTies({{7, 1}, {{"a", {2, 2}}}, ""})).ok());
  EXPECT_FALSE(DecodeTies(EncodeTies({{7, 1}, {{"a", {-1}}}, ""})).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeTies(bytes.substr(0, size)).ok()) << size;
  }
  const std::string begun = EncodeBegun({.names = {"ab"}});
  for (size_t size = 1; size < begun.size(); ++size) {
    EXPECT_FALSE(DecodeBegun(begun.substr(0, size)).ok()) << size;
  }
}

TEST(StepPlanTest, WhoHasSteppedIsReadAsItWasWritten) {
  const Stepped stepped = {{1, true}, {4, false}};
  const std::string bytes = EncodeStepped(stepped);
  const absl::StatusOr<Stepped> read = DecodeStepped(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, stepped);
  EXPECT_TRUE(DecodeStepped(EncodeStepped({}))->empty());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeStepped(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeStepped(bytes + "x").ok());
}

TEST(StepPlanTest, SkipsAreReadAsTheyWereWrittenAndLeadOn) {
  const Parcel parcel{.kind = Parcel::Kind::kSkipGradient,
                      .stage = 2,
                      .micro_batch = 3,
                      .wanted = {true, false},
                      .other = 5,
                      .skips = {{0, 2}, {1, 7}}};
  const absl::StatusOr<Parcel> read = DecodeParcel(EncodeParcel(parcel));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->kind, parcel.kind);
  EXPECT_EQ(read->wanted, parcel.wanted);
  EXPECT_EQ(read->other, 5);
  ASSERT_EQ(read->skips.size(), 2u);
  EXPECT_EQ(read->skips[0].to, 2);
  EXPECT_EQ(read->skips[1].from, 1);
  EXPECT_EQ(read->skips[1].to, 7);
  const auto refused = [](auto change) {
    Parcel changed{.stage = 2, .skips = {{0, 2}}};
    change(changed);
    return DecodeParcel(EncodeParcel(changed)).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refused([](Parcel&) {}));
  EXPECT_TRUE(refused([](Parcel& parcel) { parcel.other = -1; }));
  EXPECT_TRUE(refused([](Parcel& parcel) { parcel.skips[0].from = -1; }));
  EXPECT_TRUE(refused([](Parcel& parcel) { parcel.skips[0].from = 1; })) << "to the next";
  EXPECT_TRUE(refused([](Parcel& parcel) { parcel.stage = 3; })) << "it is past its end";
  EXPECT_TRUE(refused([](Parcel& parcel) { parcel.kind = static_cast<Parcel::Kind>(6); }));
}

TEST(StepPlanTest, WhatDoesNotFitTogetherIsRefused) {
  const auto refused = [](auto change) {
    StepPlan plan = SomePlan();
    change(plan);
    return DecodePlan(EncodePlan(plan)).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_FALSE(refused([](StepPlan&) {}));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.rank = 2; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.rank = -1; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.rank_of_stage[0] = 2; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.workers.push_back("without a stage"); }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.micro_batches = 0; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.micro_batches = 1 << 19; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.weights.pop_back(); }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.weights.push_back(1); }));
  EXPECT_TRUE(
      refused([](StepPlan& plan) { plan.weights[0] = std::numeric_limits<double>::quiet_NaN(); }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.list[0].stage = 0; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.list[0].micro_batch = 3; }));
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.list[0].kind = static_cast<Action::Kind>(9); }));
  // Without backward there may be no context, of which these take gradients.
  EXPECT_TRUE(refused([](StepPlan& plan) { plan.backward = false; }));
  const auto alone = [&](Action::Kind kind) {
    return refused([kind](StepPlan& plan) {
      plan.backward = false;
      plan.list = {{kind, 1, 0}};
    });
  };
  EXPECT_FALSE(alone(Action::Kind::kForward));
  EXPECT_FALSE(alone(Action::Kind::kReceiveActivation));
  EXPECT_TRUE(alone(Action::Kind::kBackwardWeight));
  EXPECT_TRUE(alone(Action::Kind::kStep));
}

// Whatever stands in the bytes, it is read or refused.
TEST(StepPlanTest, ShortenedAndChangedBytesAreRefusedOrMakeSense) {
  const std::string plan = EncodePlan(SomePlan());
  for (size_t size = 0; size < plan.size(); ++size) {
    EXPECT_FALSE(DecodePlan(plan.substr(0, size)).ok()) << size;
  }
  const std::string parcel = EncodeParcel({.wanted = {true}, .skips = {{0, 2}}});
  for (size_t size = 0; size < parcel.size(); ++size) {
    EXPECT_FALSE(DecodeParcel(parcel.substr(0, size)).ok()) << size;
  }
  std::mt19937 random(21);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = plan;
    bytes[random() % bytes.size()] = static_cast<char>(random());
    const absl::StatusOr<StepPlan> read = DecodePlan(bytes);
    if (!read.ok()) continue;
    EXPECT_LT(read->rank, static_cast<int>(read->workers.size()));
    for (const Action& action : read->list) {
      ASSERT_LT(action.stage, read->stages());
      ASSERT_LT(action.micro_batch, read->micro_batches);
    }
  }
}

}  // namespace
}  // namespace distgrad
