// What each generator promises of its schedules, and faulty ones that are refused.
#include "core/pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace distgrad {
namespace {

using Kind = Action::Kind;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kMost = 8;

// The whole backward takes as long as its halves.
double UnitTime(const Action& action) {
  switch (action.kind) {
    case Kind::kForward:
    case Kind::kBackwardInput:
    case Kind::kBackwardWeight:
      return 1;
    case Kind::kBackward:
      return 2;
    default:
      return 0;
  }
}

struct Named {
  std::string name;
  Schedule schedule;
  int ranks = 0;
  double work = 0;  // of each rank, in unit times
  double bubble = 0;
  bool exact = true;               // or at most as long
  std::vector<int> activations{};  // that each rank holds
};

// All generators, with what their headers say of them.
std::vector<Named> All(int ranks, int micro_batches) {
  std::vector<Named> all;
  const double work = 3.0 * micro_batches;
  std::vector<int> all_of_them(ranks, micro_batches), falling, no_more_than_ranks, twice_the_ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    falling.push_back(std::min(micro_batches, ranks - rank));
    no_more_than_ranks.push_back(std::min(micro_batches, ranks));
    twice_the_ranks.push_back(std::min(micro_batches, 2 * ranks - 1));
  }
  all.push_back(
      {"GPipe", *GPipe(ranks, micro_batches), ranks, work, 3.0 * (ranks - 1), true, all_of_them});
  all.push_back({"1F1B", *OneForwardOneBackward(ranks, micro_batches), ranks, work,
                 3.0 * (ranks - 1), true, falling});
  for (const int v : {1, 2, 3}) {
    const int rounded_up = (micro_batches + ranks - 1) / ranks * ranks;
    const bool whole = rounded_up == micro_batches;
    std::vector<int> most;
    for (int rank = 0; rank < ranks; ++rank) {
      most.push_back(std::min(micro_batches * v, (v - 1) * ranks + 2 * (ranks - rank - 1) + 1));
    }
    all.push_back({absl::StrCat("interleaved 1F1B, ", v, " stages on each rank"),
                   *InterleavedOneForwardOneBackward(ranks, v, micro_batches), ranks, work * v,
                   3.0 * (ranks - 1) + 3.0 * v * (rounded_up - micro_batches), whole,
                   whole ? most : std::vector<int>{}});
  }
  all.push_back({"ZB-H1", *ZeroBubbleH1(ranks, micro_batches), ranks, work,
                 1.0 * (ranks - 1) + std::max(0, ranks - micro_batches), true, no_more_than_ranks});
  all.push_back({"ZB-H2", *ZeroBubbleH2(ranks, micro_batches), ranks, work,
                 1.0 * (ranks - 1) + std::max(0, ranks - 1 - micro_batches / 2), true,
                 twice_the_ranks});
  return all;
}

void ForAll(int most, const std::function<void(Named&)>& use) {
  for (int ranks = 1; ranks <= most; ++ranks) {
    for (int micro_batches = 1; micro_batches <= most; ++micro_batches) {
      for (Named& named : All(ranks, micro_batches)) {
        SCOPED_TRACE(
            absl::StrCat(named.name, ", ", ranks, " ranks, ", micro_batches, " micro-batches"));
        use(named);
      }
    }
  }
}

TEST(ScheduleTest, EachGeneratorMakesSchedulesThatEndAndHoldWhatTheyPromise) {
  int checked = 0;
  ForAll(kMost, [&](Named& named) {
    ++checked;
    EXPECT_EQ(Check(named.schedule), absl::OkStatus());
    EXPECT_EQ(named.schedule.ranks(), named.ranks);
    ASSERT_EQ(named.schedule.max_activations.size(), named.schedule.lists.size());
    // A promise of less is refused: it is as low as it can be.
    if (named.activations.empty()) return;
    EXPECT_EQ(named.schedule.max_activations, named.activations);
    for (int& most : named.schedule.max_activations) {
      --most;
      EXPECT_THAT(std::string(Check(named.schedule).message()), HasSubstr("activations at once"));
      ++most;
    }
  });
  EXPECT_EQ(checked, kMost * kMost * 7);
}

TEST(ScheduleTest, TheBubbleIsThatOfTheFormula) {
  ForAll(kMost, [&](Named& named) {
    const absl::StatusOr<Timeline> timeline = Simulate(named.schedule, UnitTime);
    ASSERT_TRUE(timeline.ok()) << timeline.status();
    for (const double busy : timeline->busy) EXPECT_EQ(busy, named.work);
    const double bubble = timeline->end - named.work;
    if (named.exact) {
      EXPECT_EQ(bubble, named.bubble);
    } else {
      EXPECT_LE(bubble, named.bubble);
    }
  });
}

TEST(ScheduleTest, AStageDoesTheBackwardOfItsMicroBatchesInTheirOrder) {
  ForAll(kMost, [](Named& named) {
    std::map<std::pair<Kind, int>, int> next;  // by kind and stage
    for (const std::vector<Action>& list : named.schedule.lists) {
      for (const Action& action : list) {
        EXPECT_EQ((next[{action.kind, action.stage}]++), action.micro_batch) << ToString(action);
      }
    }
  });
}

TEST(ScheduleTest, AForwardAloneNeedsNoBackward) {
  for (int stages = 1; stages <= kMost; ++stages) {
    for (int ranks = 1; ranks <= stages; ++ranks) {
      for (int micro_batches = 1; micro_batches <= kMost; ++micro_batches) {
        std::vector<int> rank_of_stage;
        for (int s = 0; s < stages; ++s) rank_of_stage.push_back(s % ranks);
        absl::StatusOr<Schedule> schedule = ForwardOnly(rank_of_stage, micro_batches);
        ASSERT_TRUE(schedule.ok()) << schedule.status();
        EXPECT_EQ(Check(*schedule), absl::OkStatus());
        schedule->backward = true;
        EXPECT_THAT(std::string(Check(*schedule).message()),
                    HasSubstr("backward of stage 0, micro-batch 0 is missing"));
      }
    }
  }
}

TEST(ScheduleTest, AMissingActionIsNamed) {
  ForAll(4, [](Named& named) {
    for (std::vector<Action>& list : named.schedule.lists) {
      for (size_t i = 0; i < list.size(); ++i) {
        const std::vector<Action> whole = list;
        list.erase(list.begin() + i);
        const absl::Status status = Check(named.schedule);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        // Without its whole backward, or one of its halves, a stage lacks either.
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr(" is missing"), HasSubstr(ToString(whole[i]))));
        list = whole;
      }
    }
  });
}

TEST(ScheduleTest, ADoubledActionIsNamed) {
  ForAll(4, [](Named& named) {
    for (std::vector<Action>& list : named.schedule.lists) {
      for (size_t i = 0; i < list.size(); ++i) {
        const std::vector<Action> whole = list;
        list.push_back(list[i]);
        EXPECT_EQ(Check(named.schedule).message(),
                  absl::StrCat("the ", ToString(whole[i]), " is there twice"));
        list = whole;
      }
    }
  });
}

// What an action needs, said once more and in another way: each stage's actions of a micro-batch
// are links of one chain.
bool Needs(const Schedule& schedule, const Action& a, const Action& b) {
  if (a.kind == Kind::kStep) {
    return a.stage == b.stage && (b.kind == Kind::kBackward || b.kind == Kind::kBackwardWeight);
  }
  if (a.micro_batch != b.micro_batch) return false;
  const auto from = [&](int stage, std::initializer_list<Kind> kinds) {
    return b.stage == stage && std::find(kinds.begin(), kinds.end(), b.kind) != kinds.end();
  };
  const auto crosses = [&](int to) {
    return to > 0 && to < schedule.stages() &&
           schedule.rank_of_stage[to] != schedule.rank_of_stage[to - 1];
  };
  const int s = a.stage;
  switch (a.kind) {
    case Kind::kForward:
      return crosses(s) ? from(s, {Kind::kReceiveActivation}) : from(s - 1, {Kind::kForward});
    case Kind::kBackward:
    case Kind::kBackwardInput:
      return from(s, {Kind::kForward}) ||
             (crosses(s + 1) ? from(s, {Kind::kReceiveGradient})
                             : from(s + 1, {Kind::kBackward, Kind::kBackwardInput}));
    case Kind::kBackwardWeight:
      return from(s, {Kind::kBackwardInput});
    case Kind::kSendActivation:
      return from(s, {Kind::kForward});
    case Kind::kReceiveActivation:
      return from(s - 1, {Kind::kSendActivation});
    case Kind::kSendGradient:
      return from(s, {Kind::kBackward, Kind::kBackwardInput});
    case Kind::kReceiveGradient:
      return from(s + 1, {Kind::kSendGradient});
    default:
      return false;
  }
}

// Whether "behind in a list" and "needs" together have no circle, by taking away what has nothing
// before it.
bool Ends(const Schedule& schedule) {
  std::vector<std::vector<Action>> rest = schedule.lists;
  const auto ready = [&](const Action& action) {
    for (const std::vector<Action>& list : rest) {
      for (const Action& other : list) {
        if (Needs(schedule, action, other)) return false;
      }
    }
    return true;
  };
  for (bool taken = true; taken;) {
    taken = false;
    for (std::vector<Action>& list : rest) {
      if (list.empty() || !ready(list.front())) continue;
      list.erase(list.begin());
      taken = true;
    }
  }
  return std::all_of(rest.begin(), rest.end(), [](const auto& list) { return list.empty(); });
}

TEST(ScheduleTest, SwappedActionsAreRefusedWhereTheyComeToNoEnd) {
  int refused = 0, taken = 0;
  ForAll(4, [&](Named& named) {
    Schedule& schedule = named.schedule;
    schedule.max_activations.clear();
    for (std::vector<Action>& list : schedule.lists) {
      for (size_t i = 1; i < list.size(); ++i) {
        std::swap(list[i - 1], list[i]);
        const absl::Status status = Check(schedule);
        const bool ends = Ends(schedule);
        EXPECT_EQ(status.ok(), ends) << status;
        ++(ends ? taken : refused);
        if (!ends) {
          EXPECT_THAT(std::string(status.message()), HasSubstr("waits for ever"));
        }
        if (Needs(schedule, list[i - 1], list[i])) {
          EXPECT_THAT(std::string(status.message()),
                      AllOf(HasSubstr(absl::StrCat("its ", ToString(list[i - 1]), " needs the ",
                                                   ToString(list[i]))),
                            HasSubstr("later in the same list")));
        }
        std::swap(list[i - 1], list[i]);
      }
    }
  });
  EXPECT_GT(refused, 100);
  EXPECT_GT(taken, 100);
}

TEST(ScheduleTest, ShuffledListsAreRefusedWhereTheyComeToNoEnd) {
  std::mt19937 random(20230101);
  int refused = 0, taken = 0;
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const int ranks = 1 + random() % 4, micro_batches = 1 + random() % 4;
    std::vector<Named> all = All(ranks, micro_batches);
    Named& named = all[random() % all.size()];
    Schedule& schedule = named.schedule;
    schedule.max_activations.clear();
    for (int swaps = 1 + random() % 3; swaps > 0; --swaps) {
      std::vector<Action>& list = schedule.lists[random() % ranks];
      std::swap(list[random() % list.size()], list[random() % list.size()]);
    }
    const bool ends = Ends(schedule);
    EXPECT_EQ(Check(schedule).ok(), ends) << named.name << ": " << Check(schedule);
    ++(ends ? taken : refused);
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(taken, 100);
}

// Halves apart take longer than a whole backward, and nobody waits for what the first stage's would
// have early.
TEST(ScheduleTest, ZeroBubbleHasHalvesWhereARankWaitsForTheFirst) {
  for (const Schedule& schedule : {*ZeroBubbleH1(3, 4), *ZeroBubbleH2(3, 4)}) {
    for (size_t rank = 0; rank < schedule.lists.size(); ++rank) {
      for (const Action& action : schedule.lists[rank]) {
        const bool half =
            action.kind == Kind::kBackwardInput || action.kind == Kind::kBackwardWeight;
        EXPECT_FALSE(rank == 0 ? half : action.kind == Kind::kBackward) << "rank " << rank;
      }
    }
  }
}

// What ZB-H2 holds more activations for: gradients of inputs that take longer than those of
// weights, and transfers that take a while, here as parts of the computing.
TEST(ScheduleTest, MoreForwardsAheadHideWhatTheFirstGradientsWaitFor) {
  constexpr int kRanks = 4, kMicroBatches = 8;
  const auto uneven = [](const Action& action) {
    switch (action.kind) {
      case Kind::kBackwardInput:
        return 1.3;
      case Kind::kBackwardWeight:
        return 0.7;
      default:
        return UnitTime(action);
    }
  };
  const auto bubble = [&](const Schedule& schedule) {
    return Simulate(schedule, uneven)->end - 3.0 * kMicroBatches;
  };
  EXPECT_NEAR(bubble(*ZeroBubbleH1(kRanks, kMicroBatches)), (kRanks - 1) * 1.6, 1e-9);
  EXPECT_NEAR(bubble(*ZeroBubbleH2(kRanks, kMicroBatches)), (kRanks - 1) * 1.0, 1e-9);
}

// The times of a forward and of the halves of a backward, in eighths.
struct Eighths {
  int forward = 8, input = 8, weight = 8;

  double operator()(const Action& action) const {
    switch (action.kind) {
      case Kind::kForward:
        return forward / 8.0;
      case Kind::kBackwardInput:
        return input / 8.0;
      case Kind::kBackwardWeight:
        return weight / 8.0;
      case Kind::kBackward:
        return (input + weight) / 8.0;
      default:
        return 0;
    }
  }
};

double IdleTime(const Schedule& schedule, const Eighths& times) {
  const absl::StatusOr<Timeline> timeline = Simulate(schedule, times);
  EXPECT_TRUE(timeline.ok()) << timeline.status();
  for (const double busy : timeline->busy) EXPECT_EQ(busy, timeline->busy[0]);
  return timeline->end - timeline->busy[0];
}

TEST(ScheduleTest, ZeroBubbleH2IsIdleForTheForwardsOfTheOtherRanks) {
  int checked = 0;
  for (int ranks = 2; ranks <= kMost; ++ranks) {
    for (const int micro_batches : {2 * ranks - 1, 2 * ranks, 3 * ranks}) {
      const Schedule h1 = *ZeroBubbleH1(ranks, micro_batches);
      const Schedule h2 = *ZeroBubbleH2(ranks, micro_batches);
      for (int input = 8; input <= 16; ++input) {
        for (int weight = (input + 1) / 2; weight <= input; ++weight) {
          SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", micro_batches, " micro-batches, ", input,
                                    " and ", weight, " eighths"));
          const Eighths times = {.input = input, .weight = weight};
          const double idle = IdleTime(h2, times);
          EXPECT_EQ(idle, ranks - 1);
          EXPECT_LE(idle, IdleTime(h1, times));
          ++checked;
        }
      }
    }
  }
  EXPECT_EQ(checked, 3 * (kMost - 1) * 61);
}

TEST(ScheduleTest, ZeroBubbleH2IsIdleForLongerOutsideOfThatCondition) {
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(2, 100), {8, 24, 16}), 2);  // I > 2 F
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(4, 200), {8, 24, 8}), 6);
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(2, 100), {8, 8, 2}), 1.5);  // W < I / 2
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(2, 2), {8, 16, 8}), 2);     // M < 2 S - 1
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(3, 4), {8, 16, 8}), 3);
  EXPECT_EQ(IdleTime(*ZeroBubbleH2(3, 4), {8, 8, 8}), 2);  // equal times need no more
}

TEST(ScheduleTest, ZeroBubbleTakesAnyNumberOfForwardsAhead) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (int micro_batches = 1; micro_batches <= 8; ++micro_batches) {
      EXPECT_EQ(ZeroBubble(ranks, micro_batches, 1)->lists,
                ZeroBubbleH1(ranks, micro_batches)->lists);
      EXPECT_EQ(ZeroBubble(ranks, micro_batches, 2)->lists,
                ZeroBubbleH2(ranks, micro_batches)->lists);
      for (const int ahead : {3, 4, 100, 1 << 30}) {
        const Schedule schedule = *ZeroBubble(ranks, micro_batches, ahead);
        EXPECT_EQ(Check(schedule), absl::OkStatus()) << ranks << " " << micro_batches;
      }
    }
  }
  const absl::Status none = ZeroBubble(2, 4, 0).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("needs at least 1"));
}

// The time from one step's end to the next one's, where each rank goes through the list of one step
// behind that of the other.
double TimeOfStepsInFlight(const Schedule& schedule) {
  const auto end_of = [&](int steps) {
    Schedule all = schedule;
    all.micro_batches *= steps;
    for (std::vector<Action>& list : all.lists) {
      const std::vector<Action> once = list;
      for (int i = 1; i < steps; ++i) {
        for (Action action : once) {
          action.micro_batch += i * schedule.micro_batches;
          list.push_back(action);
        }
      }
    }
    return Simulate(all, UnitTime)->end;
  };
  return (end_of(8) - end_of(4)) / 4;
}

TEST(ScheduleTest, InTheMiddleOfStepsInFlightZeroBubbleH2IsNeverIdle) {
  for (int ranks = 2; ranks <= 6; ++ranks) {
    for (int micro_batches = 2 * ranks - 1; micro_batches <= 2 * ranks + 3; ++micro_batches) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", micro_batches, " micro-batches"));
      const double work = 3.0 * micro_batches;
      EXPECT_EQ(TimeOfStepsInFlight(*ZeroBubbleH2(ranks, micro_batches)), work);
      EXPECT_GT(TimeOfStepsInFlight(*ZeroBubbleH1(ranks, micro_batches)), work);
      EXPECT_GT(TimeOfStepsInFlight(*OneForwardOneBackward(ranks, micro_batches)), work);
    }
  }
}

TEST(ScheduleTest, ZeroBubbleH1IsNoSlowerWithEqualTimesAndFewMicroBatches) {
  for (int ranks = 2; ranks <= kMost; ++ranks) {
    for (int micro_batches = 1; micro_batches < 2 * (ranks - 1); ++micro_batches) {
      const double h1 = IdleTime(*ZeroBubbleH1(ranks, micro_batches), {});
      const double h2 = IdleTime(*ZeroBubbleH2(ranks, micro_batches), {});
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", micro_batches, " micro-batches"));
      if (micro_batches < 3) {
        EXPECT_EQ(h1, h2);
      } else {
        EXPECT_LT(h1, h2);
      }
    }
  }
}

TEST(ScheduleTest, StepsComeOnceForEachStageBehindItsGradients) {
  Schedule schedule = *ZeroBubbleH1(2, 3);
  schedule.lists[0].push_back({Kind::kStep, 0});
  EXPECT_EQ(Check(schedule).message(), "the step of stage 1 is missing");
  schedule.lists[1].push_back({Kind::kStep, 1});
  EXPECT_EQ(Check(schedule), absl::OkStatus());
  std::swap(schedule.lists[1].back(), schedule.lists[1][schedule.lists[1].size() - 2]);
  EXPECT_EQ(Check(schedule).message(),
            "rank 1 waits for ever: its step of stage 1 needs the backward of weights of stage 1, "
            "micro-batch 2, which comes later in the same list");
}

TEST(ScheduleTest, WhatMakesNoSenseIsNamed) {
  EXPECT_EQ(GPipe(0, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OneForwardOneBackward(1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(InterleavedOneForwardOneBackward(1 << 16, 1 << 16, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(InterleavedOneForwardOneBackward(2, 0, 4).status().message()),
              HasSubstr("2 ranks with 0 stages each"));
  EXPECT_EQ(ZeroBubbleH1(-1, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ZeroBubbleH2(1 << 20, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ForwardOnly({0, 7}, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Check({}).code(), absl::StatusCode::kInvalidArgument);

  const Schedule good = *OneForwardOneBackward(2, 2);
  Schedule bad = good;
  bad.rank_of_stage[1] = 2;
  EXPECT_EQ(Check(bad).message(), "stage 1 is on rank 2, and there are lists for 2 ranks");
  bad = good;
  bad.max_activations.pop_back();
  EXPECT_EQ(Check(bad).message(), "max_activations has 1 numbers for 2 ranks");
  bad = good;
  bad.lists[0][0].stage = 1;
  EXPECT_EQ(Check(bad).message(),
            "rank 0 has the forward of stage 1, micro-batch 0, which is on rank 1");
  for (const Action action : {Action{Kind::kForward, 2, 0}, Action{Kind::kForward, -1, 0},
                              Action{Kind::kForward, 0, 2}, Action{Kind::kForward, 0, -1},
                              Action{Kind::kStep, 0, 1}, Action{static_cast<Kind>(9), 0, 0}}) {
    bad = good;
    bad.lists[0].push_back(action);
    EXPECT_EQ(Check(bad).message(), absl::StrCat("rank 0 has a ", ToString(action),
                                                 ", and there are 2 stages and 2 micro-batches"));
  }
  bad = good;
  bad.lists[0].push_back({Kind::kBackwardInput, 0, 0});
  EXPECT_EQ(Check(bad).message(),
            "stage 0 has both the whole backward of micro-batch 0 and halves of it");
  bad = good;
  bad.lists[0].push_back({Kind::kSendGradient, 0, 0});
  EXPECT_THAT(std::string(Check(bad).message()), HasSubstr("nothing of the schedule is to do it"));
  // At the ends of the pipeline there is nobody to send to.
  EXPECT_FALSE(Simulate(bad, UnitTime).ok() && Check(bad).ok());
  bad.lists[0] = {{Kind::kReceiveActivation, 0, 0}};
  EXPECT_THAT(std::string(Simulate(bad, UnitTime).status().message()),
              HasSubstr("which no list has"));
}

TEST(ScheduleTest, AUsersOwnListIsCompletedAndChecked) {
  // Two stages on one rank: nothing is sent between them.
  Schedule schedule{.micro_batches = 1, .rank_of_stage = {0, 0, 1}, .lists = {}};
  schedule.lists = {{{Kind::kForward, 0, 0},
                     {Kind::kForward, 1, 0},
                     {Kind::kBackwardInput, 1, 0},
                     {Kind::kBackward, 0, 0},
                     {Kind::kBackwardWeight, 1, 0}},
                    {{Kind::kForward, 2, 0}, {Kind::kBackward, 2, 0}}};
  EXPECT_EQ(Check(schedule).message(),
            "the send of activations of stage 1, micro-batch 0 is missing");
  AddTransfers(&schedule);
  EXPECT_EQ(Check(schedule), absl::OkStatus());
  const std::vector<Action> expected = {
      {Kind::kForward, 0, 0},         {Kind::kForward, 1, 0},       {Kind::kSendActivation, 1, 0},
      {Kind::kReceiveGradient, 1, 0}, {Kind::kBackwardInput, 1, 0}, {Kind::kBackward, 0, 0},
      {Kind::kBackwardWeight, 1, 0}};
  EXPECT_TRUE(schedule.lists[0] == expected);
}

TEST(ScheduleTest, StepsAreAddedBehindAllElse) {
  for (const absl::StatusOr<Schedule>& made :
       {GPipe(3, 4), ZeroBubbleH2(3, 4), InterleavedOneForwardOneBackward(2, 2, 4)}) {
    ASSERT_TRUE(made.ok()) << made.status();
    const Schedule schedule = WithSteps(*made);
    EXPECT_EQ(Check(schedule), absl::OkStatus());
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      std::vector<Action> expected = made->lists[rank];
      for (int stage = 0; stage < schedule.stages(); ++stage) {
        if (schedule.rank_of_stage[stage] == rank) expected.push_back({Kind::kStep, stage});
      }
      EXPECT_TRUE(schedule.lists[rank] == expected) << "rank " << rank;
    }
    EXPECT_EQ(Check(WithSteps(schedule)).code(), absl::StatusCode::kInvalidArgument);
  }
  Schedule wrong = *GPipe(2, 2);
  wrong.rank_of_stage = {0, 7};
  wrong = WithSteps(wrong);
  EXPECT_EQ(wrong.lists[0].back(), (Action{Kind::kStep, 0}));
  EXPECT_FALSE(wrong.lists[1].back() == (Action{Kind::kStep, 1}));
}

}  // namespace
}  // namespace distgrad
