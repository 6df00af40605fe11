// Draws what happens in a job.
#include "tests/simulation/plan.h"

#include <algorithm>
#include <iterator>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/check.h"

namespace distgrad::simulation {
namespace {

class Generator {
 public:
  explicit Generator(Plan* plan) : plan_(*plan), random_(plan->seed) {}

  void Fill(unsigned allowed) {
    // Each seed has some of the faults, and one in four none but the harmless.
    const bool harmful = Below(4) != 0;
    for (unsigned fault = 1; fault < kDeafOnes; fault <<= 1) {
      const bool drawn = Below(2) == 0;
      if (drawn && (allowed & fault) != 0 && (harmful || (fault & kHarmless) != 0)) {
        plan_.faults |= fault;
      }
    }
    plan_.workers = 2 + Below(4);
    plan_.threads = 1 + Below(3);
    if (Below(400) == 0) plan_.workers = 20 + Below(81);
    const auto one_in = [this](int n) { return Below(n) == 0; };
    trains_ = one_in(3);
    has_pipelines_ = one_in(4);
    if (one_in(3)) plan_.guests = 1 + Below(2);
    const int actors = 1 + Below(std::min(plan_.workers, 5));
    for (int actor = 0; actor < actors; ++actor) {
      for (int i = 1 + Below(5); i > 0; --i) Act(actor);
    }
    const bool averages = one_in(4), waits = one_in(4);
    const int on_lost = Below(2);
    for (int i = averages || waits ? 1 + Below(3) : 0; i > 0; --i) {
      const bool steps = averages && (!waits || Below(2) == 0);
      if (steps) {
        Add({Action::kAverages, Action::kAll, Below(1000000), 1 + Below(4)});
      } else {
        Add({Action::kBarrier, Action::kAll, on_lost});
      }
    }
    for (int guest = 0; guest < plan_.guests; ++guest) {
      Add({Action::kPause, Action::kFate, Below(100)});
      Add({Action::kGuest, Action::kFate, guest, Below(1000000), Below(400)});
    }
    if ((plan_.faults & ~(kSlowPackets | kStalls | kPreemption)) != 0) {
      for (int i = 1 + Below(4); i > 0; --i) Disturb();
    }
    if (one_in(6)) {
      const int caller = AnyWorker(), next = (caller + 1) % plan_.workers;
      const int dice = Below(80);
      Add({Action::kBurst, caller, dice < 40 ? caller : next, 0, 20 + dice % 40});
    }
    if (one_in(8)) Overtake();
    // Drawn last, so that a seed has what it had before there were these.
    const bool deafens = one_in(6), fails = one_in(6);
    if (deafens && harmful && (allowed & kDeafOnes) != 0) Deafen(Action::kDeafen, kDeafOnes);
    if (fails && harmful && (allowed & kNoConnects) != 0) FailOpen(kNoConnects);
    const bool crowds = one_in(8), awaits = one_in(8);
    if (crowds && (allowed & kPreemption) != 0) Crowd();
    if (awaits && (allowed & kClockJumps) != 0) Await();
    const bool chokes = one_in(8), hangs = one_in(8);
    if (chokes && harmful && (allowed & kChokedOnes) != 0) Deafen(Action::kChoke, kChokedOnes);
    if (hangs && harmful && (allowed & kHangs) != 0) FailOpen(kHangs);
    const bool watches = one_in(6), holds = Below(3) != 0;
    if (watches) Watch(harmful && holds && (allowed & kHolds) != 0 && (allowed & kKills) != 0);
    const bool hurries = one_in(8), looks = one_in(8);
    if (hurries && (allowed & kStalls) != 0 && (allowed & kPreemption) != 0) Hurry();
    if (looks && (allowed & kPreemption) != 0) Look();
    const bool steps = one_in(6);
    if (steps && (allowed & kStalls) != 0 && (allowed & kPreemption) != 0) TakeSteps();
    const bool stops = one_in(6);
    if (stops && harmful && (allowed & kStops) != 0) Stop();
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % n); }
  int AnyWorker() { return Below(plan_.workers); }
  int AnyoneAtAll() {
    const int guest = plan_.guests > 0 && Below(4) == 0 ? Below(plan_.guests) : -1;
    return guest < 0 ? AnyWorker() : plan_.workers + guest;
  }
  int AnyEnding() { return Below(2) == 0 ? Action::kByItself : Below(Action::kEndings); }

  void Act(int actor) {
    const int dice = Below(100);
    if (dice < 25 && plan_.workers == 5) {  // of which programs are
      Add({Action::kProgram, actor, Below(1000000)});
    } else if (dice < 55) {
      const int function = Below(Action::kFunctions);
      int ending = AnyEnding();
      if (ending == Action::kByRelease) ending = Action::kByItself;
      if (function == Action::kUntil && ending == Action::kByItself) ending = Action::kByDeadline;
      Add({Action::kCall, actor, AnyoneAtAll(), function, ending});
    } else if (dice < 65 && trains_ && trained_ < kMostTrained) {
      Add({Action::kTrain, actor, Below(1000000), trained_++, Below(Action::kTrainFlags)});
    } else if (dice < 72 && has_pipelines_) {
      Add({Action::kPipeline, actor, Below(1000000), Below(3) == 0 ? Action::kByDeadline : 0,
           Below(3) == 0 ? Below(Action::kPipelineFlags) : 0});
    } else if (dice < 90) {
      Add({Action::kPass, actor, Below(1000000), AnyEnding(), Below(Action::kPassFlags)});
    } else if (dice < 94) {
      Add({Action::kUpdate, actor});
    } else {
      Add({Action::kPause, actor, Below(3000)});
    }
  }

  void Disturb() {
    Add({Action::kPause, Action::kFate, Below(4) == 0 ? Below(6000) : Below(30)});
    const int dice = Below(6);
    const int a = AnyWorker(), b = AnyWorker();
    if (dice == 0 && (plan_.faults & (kCuts | kHalfCuts)) != 0) {
      const bool is_half = (plan_.faults & kHalfCuts) != 0 && Below(2) == 0;
      Add({Action::kCut, Action::kFate, a, b, is_half || (plan_.faults & kCuts) == 0});
    } else if (dice == 1 && (plan_.faults & kHolds) != 0) {
      Add({Action::kHold, Action::kFate, a, b, (1 + Below(8000)) * (Below(2) == 0 ? 1 : -1)});
    } else if (dice == 2 && (plan_.faults & kKills) != 0) {
      Add({Action::kKill, Action::kFate, a, Below(2), Below(3) == 0 ? -1 : Below(10000)});
    } else if (dice == 3 && (plan_.faults & kStoreFaults) != 0) {
      Add({Action::kOutage, Action::kFate, a, b, 1 + Below(8000)});
    } else if (dice == 4 && (plan_.faults & kClockJumps) != 0) {
      const int most = Below(2) == 0 ? 5000 : 7200000;
      Add({Action::kClock, Action::kFate, Below(2 * most) - most});
    } else if (dice == 5 && (plan_.faults & kNoThreads) != 0) {
      Add({Action::kRefuse, Action::kFate, a, 0, 1 + Below(3000)});
    }
  }

  // A pass whose notices overtake a call, and perhaps the end of whoever made it: at the start, so
  // that the one meets the other. Where the end comes between the two, the worker that was called
  // is on no path of the pass, so that nobody else tells it that the context is over.
  void Overtake() {
    const int actor = plan_.workers - 1;
    Action pass = {Action::kPass, actor, 4 * Below(250000), Action::kByItself,
                   Action::kLarge | Action::kAside};
    if ((plan_.faults & kKills) == 0) return AddFirst({pass});
    for (int i = 0; i < 200 && !CallsOutsider(pass); ++i) pass.a = 4 * Below(250000);
    plan_.faults |= kSlowPackets;
    std::mt19937_64 random(pass.a);
    const int caller = DrawPath(random, plan_.workers)[0];
    // The pass begins when its large packets have gone along the path.
    const int pause = 100 + Below(500), back = Below(3) == 0 ? -1 : Below(10000);
    AddFirst({pass,
              {Action::kPause, Action::kFate, pause},
              {Action::kKill, Action::kFate, caller, Below(2), back}});
  }
  bool CallsOutsider(const Action& pass) const {
    std::mt19937_64 random(pass.a);
    std::string path = DrawPath(random, plan_.workers);
    if (path.size() != 2 || path[0] == pass.actor) return false;
    const int outsider = AsideOf(path[0], path[1], plan_.workers);
    path.push_back(static_cast<char>(pass.actor));
    return path.find(static_cast<char>(outsider)) == std::string::npos;
  }

  // Many threads that send over one connection at the same time.
  void Crowd() {
    plan_.faults |= kPreemption;
    const int actor = AnyWorker(), other = (actor + 1) % plan_.workers;
    AddFirst({{Action::kCrowd, actor, other, 2 + Below(4), 2 + Below(6)}});
  }

  // Calls at once, of which the deadlines of the earlier ones have a timer set already, so that one
  // of the later ones may end between where it is begun and where it is sent: if its thread stands
  // still there.
  void Hurry() {
    plan_.faults |= kStalls | kPreemption;
    const int actor = AnyWorker(), other = (actor + Below(2)) % plan_.workers;
    AddFirst({{Action::kBurst, actor, other, 1, 20 + Below(40)}});
  }

  // Threads of the user's that ask for the state of passes while notices of these arrive: what the
  // one finds waiting is left to a pool.
  void Look() {
    plan_.faults |= kPreemption;
    const int actor = AnyWorker(), path = Below(1000000);
    AddFirst({{Action::kLook, actor, path, 1 + Below(3), 10 + Below(30)}});
  }

  // Steps of a pipeline in flight, or several drivers of one, while threads stand still: so that
  // what comes later may overtake. training.cc takes which it is from the seed of the pipeline.
  void TakeSteps() {
    plan_.faults |= kStalls | kPreemption;
    const bool rivals = Below(2) == 0, fails = !rivals && Below(3) == 0;
    const int seed = rivals ? 4 * Below(250000) + 2 : 2 * Below(500000) + 1;
    AddFirst(
        {{Action::kPipeline, AnyWorker(), seed, Action::kByItself, fails ? Action::kFails : 0}});
  }

  // Somebody sets the clock back while a thread waits with a deadline.
  void Await() {
    plan_.faults |= kClockJumps;
    const int actor = AnyWorker();
    AddFirst({{Action::kAwait, actor, AnyWorker(), 0, 500 + Below(2000)},
              {Action::kPause, Action::kFate, Below(500)},
              {Action::kClock, Action::kFate, -1 - Below(7200000)}});
  }

  // Large passes between two workers, of whose connections one goes deaf or is choked meanwhile.
  void Deafen(Action::Kind kind, unsigned fault) {
    plan_.faults |= fault;
    const int actor = AnyWorker();
    const Action pass = {Action::kPass, actor, 4 * Below(250000), Action::kByItself,
                         Action::kLarge};
    AddFirst({pass,
              pass,
              pass,
              {Action::kPause, Action::kFate, Below(200)},
              {kind, Action::kFate, actor, AnyWorker()}});
  }

  // Callbacks for members. Where one dies soon after it has begun to watch the next one, that one
  // may read in the store, once a second, that it is lost, and only then what it has sent before
  // that: the network holds it up for longer.
  void Watch(bool dies) {
    std::vector<Action> actions;
    for (int i = 0; i < std::min(plan_.workers, 5); ++i) actions.push_back({Action::kWatch, i});
    if (dies) {
      plan_.faults |= kHolds | kKills;
      const int dying = AnyWorker(), next = (dying + 1) % plan_.workers;
      // Watching begins a fifth of the heartbeat limit after the start.
      const int pause = 700 + Below(80), hold = 2000 + Below(1500), back = Below(10000);
      actions.push_back({Action::kPause, Action::kFate, pause});
      actions.push_back({Action::kHold, Action::kFate, dying, next, -hold});
      actions.push_back({Action::kPause, Action::kFate, 340 + Below(100)});
      actions.push_back({Action::kKill, Action::kFate, dying, 0, Below(2) == 0 ? -1 : back});
    }
    AddFirst(actions);
  }

  // At the start, when workers open connections to each other at the same time.
  void FailOpen(unsigned fault) {
    plan_.faults |= fault;
    AddFirst({{Action::kFailOpen, Action::kFate, AnyWorker(), fault == kHangs, 1 + Below(100)}});
  }

  // A process that stands still for less than the heartbeat limit, or for longer. Its worker may be
  // started elsewhere meanwhile, or when it has gone on.
  void Stop() {
    plan_.faults |= kStops;
    const int lasts = Below(2) == 0 ? 1 + Below(2000) : 3000 + Below(6000);
    const int back = Below(2) == 0 ? -1 : Below(8000);
    AddFirst({{Action::kPause, Action::kFate, Below(3000)},
              {Action::kStop, Action::kFate, AnyWorker(), back, lasts}});
  }

  void Add(Action action) { plan_.actions.push_back(action); }
  void AddFirst(const std::vector<Action>& actions) {
    plan_.actions.insert(plan_.actions.begin(), actions.begin(), actions.end());
  }

  Plan& plan_;
  std::mt19937_64 random_;
  bool trains_ = false, has_pipelines_ = false;
  int trained_ = 0;
};

constexpr absl::string_view kNames[] = {
    "program",  "call",    "pass",  "update",         "train",  "pipeline",
    "averages", "barrier", "guest", "pause",          "cut",    "hold",
    "kill",     "outage",  "clock", "refuse-threads", "deafen", "fail-to-connect",
    "burst",    "crowd",   "choke", "await",          "watch",  "look",
    "stop"};
static_assert(std::size(kNames) == Action::kKinds);

// Reads what Text() has written.
bool Read(absl::string_view text, Action* action) {
  const std::vector<absl::string_view> words = absl::StrSplit(text, ' ', absl::SkipEmpty());
  if (words.size() != 5) return false;
  absl::string_view actor = words[0];
  if (actor == "fate:") {
    action->actor = Action::kFate;
  } else if (actor == "all:") {
    action->actor = Action::kAll;
  } else if (!absl::ConsumePrefix(&actor, "worker") || !absl::ConsumeSuffix(&actor, ":") ||
             !absl::SimpleAtoi(actor, &action->actor)) {
    return false;
  }
  const auto* const name = std::find(std::begin(kNames), std::end(kNames), words[1]);
  if (name == std::end(kNames)) return false;
  action->kind = static_cast<Action::Kind>(name - std::begin(kNames));
  return absl::SimpleAtoi(words[2], &action->a) && absl::SimpleAtoi(words[3], &action->b) &&
         absl::SimpleAtoi(words[4], &action->c);
}

}  // namespace

std::string DrawPath(std::mt19937_64& random, int workers) {
  std::string path;
  for (int i = 1 + static_cast<int>(random() % 4); i > 0; --i) {
    path.push_back(static_cast<char>(random() % workers));
  }
  return path;
}

int AsideOf(int i, int next, int workers) {
  return (i + 1 + next % std::max(1, workers - 1)) % workers;
}

Plan DrawPlan(uint64_t seed, unsigned faults) {
  Plan plan;
  plan.seed = seed;
  Generator(&plan).Fill(faults);
  return plan;
}

std::string Text(const Action& action) {
  const std::string actor = action.actor == Action::kFate  ? "fate"
                            : action.actor == Action::kAll ? "all"
                                                           : absl::StrCat("worker", action.actor);
  return absl::StrCat(actor, ": ", kNames[action.kind], " ", action.a, " ", action.b, " ",
                      action.c);
}

std::string Text(const Plan& plan) {
  std::string text =
      absl::StrCat("seed ", plan.seed, " faults ", plan.faults, " workers ", plan.workers,
                   " threads ", plan.threads, " guests ", plan.guests, plan.trace ? " trace" : "",
                   plan.fibers ? "" : " no-fibers", "\n");
  for (const Action& action : plan.actions) absl::StrAppend(&text, "  ", Text(action), "\n");
  return text;
}

Plan ReadPlan(absl::string_view text) {
  Plan plan;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    if (!absl::StartsWith(line, "seed ")) {
      plan.actions.emplace_back();
      DG_CHECK(Read(line, &plan.actions.back()))
          << "not an action of a plan: " << std::string(line);
      continue;
    }
    std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const auto take = [&words](absl::string_view last) {
      const bool has = words.back() == last;
      if (has) words.pop_back();
      return has;
    };
    plan.fibers = !take("no-fibers");
    plan.trace = take("trace");
    DG_CHECK(words.size() == 10 && absl::SimpleAtoi(words[1], &plan.seed) &&
             absl::SimpleAtoi(words[3], &plan.faults) &&
             absl::SimpleAtoi(words[5], &plan.workers) &&
             absl::SimpleAtoi(words[7], &plan.threads) && absl::SimpleAtoi(words[9], &plan.guests))
        << "not the first line of a plan: " << std::string(line);
  }
  return plan;
}

}  // namespace distgrad::simulation
