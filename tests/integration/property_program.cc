// Makes random steps, prints them, and leaves steps out one by one.
#include "tests/integration/property_program.h"

#include <algorithm>
#include <cstddef>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {
namespace {

class Generator {
 public:
  explicit Generator(uint64_t seed)
      : random_(seed), workers_(1 + Below(kWorkers)), has_newcomer_(Below(4) == 0) {}

  Steps Main() {
    Steps steps = Body(5 + Below(10), 0, /*alone=*/true);
    if (has_newcomer_) {
      // The first message to it, which has to wait.
      steps.push_back({Step::kAsync, kNewcomer, 0, Below(2), Places(1 + Below(3)),
                       Places(1 + Below(3)), Body(Below(8), 1, /*alone=*/false)});
      steps.push_back({Step::kJoin});
    }
    for (Step& step : Body(5 + Below(10), 0, /*alone=*/true)) steps.push_back(std::move(step));
    steps.push_back({Step::kBackward, Below(3) == 0, 0, 0, Places(2 + Below(4)), {}, {}});
    return steps;
  }

 private:
  int Below(int n) { return static_cast<int>(random_() % n); }
  std::vector<int> Places(int n) {
    std::vector<int> places(n);
    for (int& place : places) place = Below(64);
    return places;
  }
  int AnyWorker() { return has_newcomer_ && Below(8) == 0 ? kNewcomer : Below(workers_); }

  Step Call(int depth, bool alone) {
    const bool async = Below(3) == 0;
    Step call{async ? Step::kAsync : Step::kCall, AnyWorker()};
    if (Below(10) == 0) call.b = 1 + Below(Step::kModes - 1);
    call.c = Below(4) == 0;
    call.arguments = Places(Below(5));
    call.results = Places(Below(5));
    // What is made in another mode is not kept for calls that are made in none.
    call.body = Body(Below(8), depth + 1, alone && !async && call.b == Step::kDefault);
    return call;
  }
  Step Nested(int depth) {
    Step nested{Step::kNested, Below(64), Below(2), Below(4) == 0};
    nested.results = Places(1 + Below(2));
    nested.body = Body(1 + Below(4), depth + 1, /*alone=*/false);
    return nested;
  }
  Step Saved(int depth) {
    Step saved{Step::kSaved, Below(64)};
    saved.body = Body(1 + Below(3), depth + 1, /*alone=*/false);
    return saved;
  }
  // `alone`: no other call is in flight once this frame has joined its own, so the order of what
  // has side effects is certain.
  Steps Body(int size, int depth, bool alone) {
    constexpr int kDeepest = 4;
    Steps steps;
    if (Below(3) == 0) steps.push_back({Step::kParameter, Below(64)});
    for (int i = 0; i < size; ++i) {
      const int dice = Below(100);
      if (dice < 30) {
        steps.push_back({Step::kOp, Below(64), Below(64), Below(8)});
      } else if (dice < 38) {
        steps.push_back({Step::kParameter, Below(64)});
      } else if (dice < 41) {
        steps.push_back({Step::kConstant, Below(64)});
      } else if (dice < 45) {
        steps.push_back({Step::kInPlace, Below(64), Below(Step::kInPlaces)});
      } else if (dice < 50) {
        steps.push_back({Step::kFunction, Below(64), Below(64), Below(2)});
      } else if (dice < 53) {
        steps.push_back({Step::kHook, Below(64)});
      } else if (dice < 56) {
        steps.push_back({Step::kNodeHook, Below(64), Below(2)});
      } else if (dice < 60 && depth < kDeepest) {
        steps.push_back(dice < 58 ? Nested(depth) : Saved(depth));
      } else if (dice < 64) {
        steps.push_back({Step::kOperator, Below(64), Below(64), AnyWorker()});
      } else if (dice < 86 && depth < kDeepest) {
        steps.push_back(Call(depth, alone));
      } else if (dice < 90) {
        steps.push_back({Step::kJoin});
      } else if (alone && dice < 93) {
        steps.push_back({Step::kKeep, Below(64)});
      } else if (alone && dice < 96) {
        steps.push_back({Step::kFetch, Below(64)});
      } else if (alone) {
        steps.push_back({Step::kBackward, /*retain_graph=*/1, Below(2), 0, Places(1 + Below(2))});
      }
    }
    return steps;
  }

  std::mt19937_64 random_;
  const int workers_;
  const bool has_newcomer_;
};

unsigned FeatureOf(const Step& step) {
  switch (step.kind) {
    case Step::kFunction:
    case Step::kHook:
      return kUnusedTensors;
    case Step::kNodeHook:
      return kNodeHooks;
    case Step::kNested:
    case Step::kSaved:
      return kNestedContexts;
    case Step::kOperator:
      return step.c == kNewcomer ? unsigned{kNewcomers} : 0U;
    case Step::kCall:
    case Step::kAsync:
      return step.a == kNewcomer ? unsigned{kNewcomers} : 0U;
    default:
      return 0;
  }
}

void LeaveOut(unsigned features, Steps& steps) {
  steps.erase(
      std::remove_if(steps.begin(), steps.end(),
                     [features](const Step& step) { return (FeatureOf(step) & features) != 0; }),
      steps.end());
  for (Step& step : steps) LeaveOut(features, step.body);
}

std::string IndentedText(const Steps& steps, int indent) {
  std::string text;
  for (const Step& step : steps) {
    absl::StrAppend(&text, std::string(2 * indent, ' '), Text(step), "\n",
                    IndentedText(step.body, indent + 1));
  }
  return text;
}

}  // namespace

Steps RandomProgram(uint64_t seed, unsigned features) {
  Steps steps = Generator(seed).Main();
  LeaveOut(~features, steps);
  return steps;
}

std::string Text(const Step& step) {
  static const char* const kNames[] = {
      "op",    "parameter", "constant", "in-place", "function", "hook", "node hook", "nested",
      "saved", "operator",  "call",     "async",    "join",     "keep", "fetch",     "backward"};
  return absl::StrCat(kNames[step.kind], " ", step.a, " ", step.b, " ", step.c, " (",
                      absl::StrJoin(step.arguments, " "), ") -> (",
                      absl::StrJoin(step.results, " "), ")");
}

std::string Text(const Steps& steps) { return IndentedText(steps, 1); }

int CountSteps(const Steps& steps) {
  int count = 0;
  for (const Step& step : steps) count += 1 + CountSteps(step.body);
  return count;
}

bool HasSideEffects(const Step& step) {
  switch (step.kind) {
    case Step::kKeep:
    case Step::kFetch:
    case Step::kBackward:
      return true;
    default:
      return std::any_of(step.body.begin(), step.body.end(), HasSideEffects);
  }
}

bool CallsNewcomer(const Steps& steps) {
  return std::any_of(steps.begin(), steps.end(), [](const Step& step) {
    return FeatureOf(step) == kNewcomers || CallsNewcomer(step.body);
  });
}

std::vector<Steps> Smaller(const Steps& steps) {
  std::vector<Steps> smaller, fewer, simpler;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto with = [&](auto change) {
      Steps changed = steps;
      change(changed[i]);
      return changed;
    };
    smaller.push_back(steps);
    smaller.back().erase(smaller.back().begin() + static_cast<ptrdiff_t>(i));
    for (const auto list : {&Step::arguments, &Step::results}) {
      for (size_t k = 0; k < (steps[i].*list).size(); ++k) {
        fewer.push_back(
            with([&](Step& s) { (s.*list).erase((s.*list).begin() + static_cast<ptrdiff_t>(k)); }));
        if ((steps[i].*list)[k] != 0) simpler.push_back(with([&](Step& s) { (s.*list)[k] = 0; }));
      }
    }
    for (const auto number : {&Step::a, &Step::b, &Step::c}) {
      // The graph of a backward that does not retain it cannot be used again.
      if (steps[i].kind != Step::kBackward && steps[i].*number != 0)
        simpler.push_back(with([&](Step& s) { s.*number = 0; }));
    }
    for (Steps& body : Smaller(steps[i].body))
      fewer.push_back(with([&](Step& s) { s.body = std::move(body); }));
  }
  for (auto* more : {&fewer, &simpler}) smaller.insert(smaller.end(), more->begin(), more->end());
  return smaller;
}

}  // namespace distgrad
