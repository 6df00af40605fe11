// Makes lists of actions, and follows them as ranks do.
#include "core/pipeline/schedule.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

using Kind = Action::Kind;

constexpr int kMostCells = 1 << 20;  // micro-batches of stages

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kForward:
      return "forward";
    case Kind::kBackward:
      return "backward";
    case Kind::kBackwardInput:
      return "backward of inputs";
    case Kind::kBackwardWeight:
      return "backward of weights";
    case Kind::kSendActivation:
      return "send of activations";
    case Kind::kReceiveActivation:
      return "receive of activations";
    case Kind::kSendGradient:
      return "send of gradients";
    case Kind::kReceiveGradient:
      return "receive of gradients";
    case Kind::kStep:
      return "step";
  }
  return "action of an unknown kind";
}

absl::Status CheckSizes(int64_t stages, int64_t micro_batches) {
  if (stages < 1 || micro_batches < 1 || stages > kMostCells || micro_batches > kMostCells ||
      stages * micro_batches > kMostCells) {
    return absl::InvalidArgumentError(
        absl::StrCat("a schedule cannot have ", stages, " stages and ", micro_batches,
                     " micro-batches: each is at least 1, and their product at most ", kMostCells));
  }
  return absl::OkStatus();
}

// One stage on each rank.
Schedule EmptySchedule(int stages, int micro_batches) {
  Schedule schedule{.micro_batches = micro_batches};
  for (int stage = 0; stage < stages; ++stage) schedule.rank_of_stage.push_back(stage);
  schedule.lists.resize(stages);
  return schedule;
}

// An action by its number. Those of one schedule have different ones.
class Numbering {
 public:
  explicit Numbering(const Schedule& schedule)
      : stages_(schedule.stages()), micro_batches_(schedule.micro_batches) {}
  size_t size() const { return size_t{Action::kKinds} * stages_ * micro_batches_; }
  size_t operator()(const Action& action) const {
    return (static_cast<size_t>(action.kind) * stages_ + action.stage) * micro_batches_ +
           action.micro_batch;
  }

 private:
  const size_t stages_, micro_batches_;
};

// What the actions of a checked list of names need.
class Needs {
 public:
  explicit Needs(const Schedule& schedule) : schedule_(schedule) {}

  bool IsLast(int stage) const { return stage == schedule_.stages() - 1; }
  // Whether what stage - 1 gives to `stage` goes to another rank.
  bool Crosses(int stage) const {
    return stage > 0 && stage < schedule_.stages() &&
           schedule_.rank_of_stage[stage] != schedule_.rank_of_stage[stage - 1];
  }

  // What has to be done before the action. Of the backward whichever form the stage has:
  // `has(action)` says whether the lists have an action.
  template <typename Has>
  std::vector<Action> Of(const Action& action, Has has) const {
    const int s = action.stage, m = action.micro_batch;
    const auto backward_of = [&](int stage) {
      const Action whole{Kind::kBackward, stage, m};
      return has(whole) ? whole : Action{Kind::kBackwardInput, stage, m};
    };
    switch (action.kind) {
      case Kind::kForward:
        if (s == 0) return {};
        return {Crosses(s) ? Action{Kind::kReceiveActivation, s, m}
                           : Action{Kind::kForward, s - 1, m}};
      case Kind::kBackward:
      case Kind::kBackwardInput:
        if (IsLast(s)) return {Action{Kind::kForward, s, m}};
        return {Action{Kind::kForward, s, m},
                Crosses(s + 1) ? Action{Kind::kReceiveGradient, s, m} : backward_of(s + 1)};
      case Kind::kBackwardWeight:
        return {Action{Kind::kBackwardInput, s, m}};
      case Kind::kSendActivation:
        return {Action{Kind::kForward, s, m}};
      case Kind::kReceiveActivation:
        return {Action{Kind::kSendActivation, s - 1, m}};
      case Kind::kSendGradient:
        return {backward_of(s)};
      case Kind::kReceiveGradient:
        return {Action{Kind::kSendGradient, s + 1, m}};
      case Kind::kStep: {
        std::vector<Action> needs;
        for (int i = 0; i < schedule_.micro_batches; ++i) {
          const Action whole{Kind::kBackward, s, i};
          needs.push_back(has(whole) ? whole : Action{Kind::kBackwardWeight, s, i});
        }
        return needs;
      }
    }
    return {};
  }

 private:
  const Schedule& schedule_;
};

// Whether the schedule's numbers fit together, and each action names what there is.
absl::Status CheckNames(const Schedule& schedule) {
  DG_RETURN_IF_ERROR(CheckSizes(schedule.stages(), schedule.micro_batches));
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.rank_of_stage[stage];
    if (rank < 0 || rank >= schedule.ranks()) {
      return absl::InvalidArgumentError(absl::StrCat("stage ", stage, " is on rank ", rank,
                                                     ", and there are lists for ", schedule.ranks(),
                                                     " ranks"));
    }
  }
  if (!schedule.max_activations.empty() &&
      schedule.max_activations.size() != schedule.lists.size()) {
    return absl::InvalidArgumentError(absl::StrCat("max_activations has ",
                                                   schedule.max_activations.size(), " numbers for ",
                                                   schedule.ranks(), " ranks"));
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.lists[rank]) {
      const bool known = static_cast<int>(action.kind) < Action::kKinds && action.stage >= 0 &&
                         action.stage < schedule.stages() && action.micro_batch >= 0 &&
                         action.micro_batch < schedule.micro_batches &&
                         (action.kind != Kind::kStep || action.micro_batch == 0);
      if (!known) {
        return absl::InvalidArgumentError(absl::StrCat(
            "rank ", rank, " has a ", ToString(action), ", and there are ", schedule.stages(),
            " stages and ", schedule.micro_batches, " micro-batches"));
      }
      if (schedule.rank_of_stage[action.stage] != rank) {
        return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " has the ", ToString(action),
                                                       ", which is on rank ",
                                                       schedule.rank_of_stage[action.stage]));
      }
    }
  }
  return absl::OkStatus();
}

// Whether the lists have each action once that they have to have, and no other.
absl::Status CheckComplete(const Schedule& schedule) {
  const Numbering number(schedule);
  const Needs needs(schedule);
  std::vector<bool> there(number.size());
  for (const std::vector<Action>& list : schedule.lists) {
    for (const Action& action : list) {
      if (there[number(action)]) {
        return absl::InvalidArgumentError(
            absl::StrCat("the ", ToString(action), " is there twice"));
      }
      there[number(action)] = true;
    }
  }
  bool has_steps = false;
  for (int s = 0; s < schedule.stages(); ++s) {
    has_steps = has_steps || there[number({Kind::kStep, s, 0})];
  }
  const auto expect = [&](const Action& action, bool expected) -> absl::Status {
    if (there[number(action)] == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "the ", ToString(action),
        expected ? " is missing" : " is there, and nothing of the schedule is to do it"));
  };
  for (int s = 0; s < schedule.stages(); ++s) {
    const bool backward = schedule.backward;
    DG_RETURN_IF_ERROR(expect({Kind::kStep, s, 0}, has_steps && backward));
    for (int m = 0; m < schedule.micro_batches; ++m) {
      DG_RETURN_IF_ERROR(expect({Kind::kForward, s, m}, true));
      const bool split = there[number({Kind::kBackwardInput, s, m})] ||
                         there[number({Kind::kBackwardWeight, s, m})];
      if (split && there[number({Kind::kBackward, s, m})]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "stage ", s, " has both the whole backward of micro-batch ", m, " and halves of it"));
      }
      DG_RETURN_IF_ERROR(expect({Kind::kBackward, s, m}, backward && !split));
      DG_RETURN_IF_ERROR(expect({Kind::kBackwardInput, s, m}, backward && split));
      DG_RETURN_IF_ERROR(expect({Kind::kBackwardWeight, s, m}, backward && split));
      DG_RETURN_IF_ERROR(expect({Kind::kSendActivation, s, m}, needs.Crosses(s + 1)));
      DG_RETURN_IF_ERROR(expect({Kind::kReceiveActivation, s, m}, needs.Crosses(s)));
      DG_RETURN_IF_ERROR(expect({Kind::kSendGradient, s, m}, backward && needs.Crosses(s)));
      DG_RETURN_IF_ERROR(expect({Kind::kReceiveGradient, s, m}, backward && needs.Crosses(s + 1)));
    }
  }
  return absl::OkStatus();
}

// Which of the rank's activations end with an action: 1, or 0.
int Releases(const Action& action) {
  return action.kind == Kind::kBackward || action.kind == Kind::kBackwardWeight ? 1 : 0;
}

}  // namespace

// Later ranks, which have fewer forwards ahead, put off as many weights more: so much is held on
// each, and that much there is to do at the end, while the gradients go back to the first.
absl::StatusOr<Schedule> ZeroBubble(int stages, int micro_batches, int forwards_ahead) {
  DG_RETURN_IF_ERROR(CheckSizes(stages, micro_batches));
  if (forwards_ahead < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a rank has ", forwards_ahead,
                                                   " forwards ahead for each rank behind it, and "
                                                   "needs at least 1"));
  }
  // More than there are micro-batches are as many.
  const int ahead_per_rank = std::min(forwards_ahead, micro_batches);
  Schedule schedule = EmptySchedule(stages, micro_batches);
  for (int s = 0; s < stages; ++s) {
    std::vector<Action>& list = schedule.lists[s];
    const int ahead = std::min(micro_batches, ahead_per_rank * (stages - 1 - s) + 1);
    const int put_off = ahead_per_rank * s;
    for (int m = 0; m < ahead; ++m) list.push_back({Kind::kForward, s, m});
    for (int m = 0; m < micro_batches; ++m) {
      if (s == 0) {
        // Nobody waits for the first stage's gradients of inputs, and both halves apart take
        // longer than a whole backward.
        list.push_back({Kind::kBackward, s, m});
      } else {
        list.push_back({Kind::kBackwardInput, s, m});
        if (m >= put_off) list.push_back({Kind::kBackwardWeight, s, m - put_off});
      }
      if (m + ahead < micro_batches) list.push_back({Kind::kForward, s, m + ahead});
    }
    for (int m = std::max(0, micro_batches - put_off); m < micro_batches; ++m) {
      list.push_back({Kind::kBackwardWeight, s, m});
    }
    schedule.max_activations.push_back(std::min(micro_batches, ahead_per_rank * (stages - 1) + 1));
  }
  AddTransfers(&schedule);
  return schedule;
}

std::string ToString(const Action& action) {
  if (action.kind == Kind::kStep) return absl::StrCat("step of stage ", action.stage);
  return absl::StrCat(NameOf(action.kind), " of stage ", action.stage, ", micro-batch ",
                      action.micro_batch);
}

absl::StatusOr<Schedule> GPipe(int stages, int micro_batches) {
  DG_RETURN_IF_ERROR(CheckSizes(stages, micro_batches));
  Schedule schedule = EmptySchedule(stages, micro_batches);
  for (int s = 0; s < stages; ++s) {
    for (const Kind kind : {Kind::kForward, Kind::kBackward}) {
      for (int m = 0; m < micro_batches; ++m) schedule.lists[s].push_back({kind, s, m});
    }
    schedule.max_activations.push_back(micro_batches);
  }
  AddTransfers(&schedule);
  return schedule;
}

absl::StatusOr<Schedule> OneForwardOneBackward(int stages, int micro_batches) {
  DG_RETURN_IF_ERROR(CheckSizes(stages, micro_batches));
  Schedule schedule = EmptySchedule(stages, micro_batches);
  for (int s = 0; s < stages; ++s) {
    const int ahead = std::min(micro_batches, stages - s);  // forwards that have no backward yet
    for (int m = 0; m < ahead; ++m) schedule.lists[s].push_back({Kind::kForward, s, m});
    for (int m = 0; m < micro_batches; ++m) {
      schedule.lists[s].push_back({Kind::kBackward, s, m});
      if (m + ahead < micro_batches) {
        schedule.lists[s].push_back({Kind::kForward, s, m + ahead});
      }
    }
    schedule.max_activations.push_back(ahead);
  }
  AddTransfers(&schedule);
  return schedule;
}

absl::StatusOr<Schedule> InterleavedOneForwardOneBackward(int ranks, int stages_per_rank,
                                                          int micro_batches) {
  if (ranks < 1 || stages_per_rank < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a schedule cannot have ", ranks, " ranks with ",
                                                   stages_per_rank,
                                                   " stages each: both numbers are at least 1"));
  }
  DG_RETURN_IF_ERROR(CheckSizes(int64_t{ranks} * stages_per_rank, micro_batches));
  Schedule schedule{.micro_batches = micro_batches};
  for (int s = 0; s < ranks * stages_per_rank; ++s) schedule.rank_of_stage.push_back(s % ranks);
  schedule.lists.resize(ranks);
  // Micro-batches come in groups of as many as there are ranks: a group goes through one stage of
  // each rank, and then through the next one. The last group is thought to be full: what is left
  // out of a list that comes to its end leaves one that does, for a micro-batch needs nothing of
  // another.
  const int groups = (micro_batches + ranks - 1) / ranks;
  const int count = groups * ranks * stages_per_rank;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto add = [&](Kind kind, int k) {
      const int group = k / (ranks * stages_per_rank), in_group = k % (ranks * stages_per_rank);
      const int turn = in_group / ranks;
      const int round = kind == Kind::kForward ? turn : stages_per_rank - 1 - turn;
      const int micro_batch = group * ranks + in_group % ranks;
      if (micro_batch >= micro_batches) return;
      schedule.lists[rank].push_back({kind, round * ranks + rank, micro_batch});
    };
    const int most = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1);
    const int ahead = std::min(count, most);
    for (int k = 0; k < ahead; ++k) add(Kind::kForward, k);
    for (int k = 0; k < count; ++k) {
      if (k + ahead < count) add(Kind::kForward, k + ahead);
      add(Kind::kBackward, k);
    }
    schedule.max_activations.push_back(std::min(micro_batches * stages_per_rank, most + 1));
  }
  AddTransfers(&schedule);
  return schedule;
}

absl::StatusOr<Schedule> ZeroBubbleH1(int stages, int micro_batches) {
  return ZeroBubble(stages, micro_batches, /*forwards_ahead=*/1);
}

absl::StatusOr<Schedule> ZeroBubbleH2(int stages, int micro_batches) {
  return ZeroBubble(stages, micro_batches, /*forwards_ahead=*/2);
}

absl::StatusOr<Schedule> ForwardOnly(std::vector<int> rank_of_stage, int micro_batches) {
  const int stages = static_cast<int>(rank_of_stage.size());
  DG_RETURN_IF_ERROR(CheckSizes(stages, micro_batches));
  Schedule schedule{.micro_batches = micro_batches, .backward = false};
  schedule.rank_of_stage = std::move(rank_of_stage);
  int ranks = 0;
  for (const int rank : schedule.rank_of_stage) {
    if (rank < 0 || rank >= stages) {
      return absl::InvalidArgumentError(
          absl::StrCat("a stage is on rank ", rank, ", and there are ", stages, " stages"));
    }
    ranks = std::max(ranks, rank + 1);
  }
  schedule.lists.resize(ranks);
  // In the order in which they could run if each stage had a rank to itself.
  for (int time = 0; time < stages + micro_batches - 1; ++time) {
    for (int s = std::max(0, time - micro_batches + 1); s < stages && s <= time; ++s) {
      schedule.lists[schedule.rank_of_stage[s]].push_back({Kind::kForward, s, time - s});
    }
  }
  AddTransfers(&schedule);
  return schedule;
}

void AddTransfers(Schedule* schedule) {
  const Needs needs(*schedule);
  for (std::vector<Action>& list : schedule->lists) {
    std::vector<Action> full;
    for (const Action& action : list) {
      const int s = action.stage, m = action.micro_batch;
      const bool known = s >= 0 && s < schedule->stages();
      const bool back = action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput;
      const bool from_next = known && needs.Crosses(s + 1), from_last = known && needs.Crosses(s);
      if (action.kind == Kind::kForward && from_last) {
        full.push_back({Kind::kReceiveActivation, s, m});
      }
      if (back && from_next) full.push_back({Kind::kReceiveGradient, s, m});
      full.push_back(action);
      if (action.kind == Kind::kForward && from_next) {
        full.push_back({Kind::kSendActivation, s, m});
      }
      if (back && from_last) full.push_back({Kind::kSendGradient, s, m});
    }
    list = std::move(full);
  }
}

Schedule WithSteps(Schedule schedule) {
  for (int s = 0; s < schedule.stages(); ++s) {
    const int rank = schedule.rank_of_stage[s];
    if (rank < 0 || rank >= schedule.ranks()) continue;
    schedule.lists[rank].push_back({Kind::kStep, s});
  }
  return schedule;
}

absl::StatusOr<Timeline> Simulate(const Schedule& schedule, ActionTime time) {
  DG_RETURN_IF_ERROR(CheckNames(schedule));
  const Numbering number(schedule);
  const Needs needs(schedule);
  const size_t ranks = schedule.lists.size();
  std::vector<bool> there(number.size());
  for (const std::vector<Action>& list : schedule.lists) {
    for (const Action& action : list) there[number(action)] = true;
  }
  const auto has = [&](const Action& action) { return there[number(action)]; };
  std::vector<std::optional<double>> done(number.size());  // when it was
  Timeline timeline;
  timeline.busy.resize(ranks);
  timeline.starts.resize(ranks);
  timeline.max_activations.resize(ranks);
  std::vector<double> now(ranks);
  std::vector<int> held(ranks);
  // What the next action of a rank waits for.
  std::vector<std::optional<Action>> awaited(ranks);
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const std::vector<Action>& list = schedule.lists[rank];
      std::vector<double>& starts = timeline.starts[rank];
      while (starts.size() < list.size()) {
        const Action& action = list[starts.size()];
        double start = now[rank];
        awaited[rank].reset();
        for (const Action& need : needs.Of(action, has)) {
          // A send or a receive at an end of the pipeline has nothing at its other end.
          const bool exists = need.stage >= 0 && need.stage < schedule.stages();
          if (exists && done[number(need)].has_value()) {
            start = std::max(start, *done[number(need)]);
          } else {
            awaited[rank] = need;
            break;
          }
        }
        if (awaited[rank].has_value()) break;
        const double takes = time(action);
        starts.push_back(start);
        now[rank] = start + takes;
        timeline.busy[rank] += takes;
        done[number(action)] = now[rank];
        if (action.kind == Kind::kForward && schedule.backward) {
          timeline.max_activations[rank] = std::max(timeline.max_activations[rank], ++held[rank]);
        }
        held[rank] -= Releases(action);
        goes_on = true;
      }
    }
  }
  // Of all that wait, first who waits for what is wrong in its own list: the others may wait for
  // it.
  absl::Status status;
  int best = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    timeline.end = std::max(timeline.end, now[rank]);
    const std::vector<Action>& list = schedule.lists[rank];
    const size_t at = timeline.starts[rank].size();
    if (at == list.size()) continue;
    const Action& need = *awaited[rank];
    const bool exists = need.stage >= 0 && need.stage < schedule.stages() && has(need);
    const size_t other = exists ? schedule.rank_of_stage[need.stage] : 0;
    const int weight = !exists ? 2 : other == rank ? 3 : 1;
    if (weight <= best) continue;
    best = weight;
    const std::string where =
        !exists ? "which no list has"
        : other == rank
            ? "which comes later in the same list"
            : absl::StrCat("which rank ", other, " has behind its ",
                           ToString(schedule.lists[other][timeline.starts[other].size()]));
    status = absl::InvalidArgumentError(absl::StrCat("rank ", rank, " waits for ever: its ",
                                                     ToString(list[at]), " needs the ",
                                                     ToString(need), ", ", where));
  }
  DG_RETURN_IF_ERROR(status);
  return timeline;
}

absl::Status Check(const Schedule& schedule) {
  DG_RETURN_IF_ERROR(CheckNames(schedule));
  DG_RETURN_IF_ERROR(CheckComplete(schedule));
  DG_ASSIGN_OR_RETURN(const Timeline timeline, Simulate(schedule, [](const Action&) { return 1; }));
  for (size_t rank = 0; rank < schedule.max_activations.size(); ++rank) {
    if (timeline.max_activations[rank] > schedule.max_activations[rank]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", rank, " holds ", timeline.max_activations[rank],
          " activations at once, and the schedule promises ", schedule.max_activations[rank]));
    }
  }
  return absl::OkStatus();
}

}  // namespace distgrad
