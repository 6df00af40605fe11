// The actions that all workers do together: averages of gradients, and barriers.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/scheduler.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {
namespace {

// Longer than anything in it takes, so that whoever is waited for in vain is found out.
constexpr absl::Duration kGroupTimeout = absl::Minutes(4);
constexpr absl::string_view kJoining = "joining the group";
constexpr absl::string_view kMaking = "making the averager";
constexpr int kReplicated = 3;  // parameters

// What a rank does in a step, which all of them know. The context is made by one worker, and the
// parameters are another one's.
struct StepOfRank {
  StepOfRank(uint64_t seed, int rank, int step) {
    std::mt19937_64 random(seed * 64 + static_cast<uint64_t>(rank * 8 + step));
    x = Constant(0.2 + 0.1 * rank + 0.05 * step);
    used = random() % (1 << kReplicated);
    follows = random() % 2 == 0;
  }
  at::Tensor Compute(at::Tensor y, const Tensors& parameters) const {
    for (int i = 0; i < kReplicated; ++i) {
      if ((used >> i & 1) != 0) y = Forward(y, parameters[i]);
    }
    return y;
  }

  at::Tensor x;
  unsigned used;  // of the parameters
  bool follows;   // the averages begin in the backward
};

}  // namespace

class Job::Rank {
 public:
  Tensors parameters;
  std::shared_ptr<ProcessGroup> group;
  std::unique_ptr<GradientAverager> averager;
};

void Job::RegisterAverages(const Process& process, int i) {
  // The payload is "SEED/STEP".
  const auto add = [&](const char* name, auto function) {
    Must(process.worker->Register(
        name, [this, i, number = process.number, function](Request& r) -> absl::StatusOr<Message> {
          const size_t slash = r.message.payload.find('/');
          const std::string key = absl::StrCat(r.message.payload.substr(0, slash), "/", number);
          std::shared_ptr<Rank> rank;
          {
            absl::MutexLock lock(&mu_);
            const auto found = ranks_.find(key);
            if (found != ranks_.end()) rank = found->second;
          }
          if (rank == nullptr) return absl::NotFoundError(absl::StrCat("there is no rank ", key));
          const uint64_t seed = std::stoull(r.message.payload.substr(0, slash));
          const int step = std::stoi(r.message.payload.substr(slash + 1));
          return function(*rank, StepOfRank(seed, i, step), r);
        }));
  };
  add("replica", [](Rank& rank, const StepOfRank& step, Request& r) -> absl::StatusOr<Message> {
    return Message{"", {step.Compute(r.message.tensors.at(0), rank.parameters)}};
  });
  add("follow", [](Rank& rank, const StepOfRank&, Request& r) -> absl::StatusOr<Message> {
    const absl::Status follows = rank.averager->AverageInBackward(*r.context.record());
    if (!follows.ok()) return follows;
    return Message{};
  });
  add("average", [](Rank& rank, const StepOfRank&, Request& r) -> absl::StatusOr<Message> {
    const absl::Status averaged = rank.averager->Average(*r.context.record());
    if (!averaged.ok()) return averaged;
    Message averages;
    for (const at::Tensor& parameter : rank.parameters) {
      const absl::StatusOr<at::Tensor> gradient = r.context.Gradient(parameter);
      if (!gradient.ok() && !absl::IsNotFound(gradient.status())) return gradient.status();
      averages.tensors.push_back(gradient.ok() ? *gradient : at::zeros_like(parameter).detach());
      averages.payload.push_back(gradient.ok() ? '1' : '0');
    }
    return averages;
  });
}

// How a rank ends that does not go on to the end, as some plans have it.
enum GivesUp { kAfterBackward, kInBackward, kWithoutAWord, kGivesUps };

bool Job::LacksOne(int size) {
  absl::MutexLock lock(&mu_);
  return !ever_killed_.empty() && *ever_killed_.begin() < size;
}

void Job::RunAverages(const Action& action, int i, Process* process) {
  const int size = std::min(plan_.workers, kMostRanks);
  if (i >= size) return;
  const auto seed = static_cast<uint64_t>(action.a);
  const std::string what = absl::StrCat(Text(action), ", rank ", i);
  const bool somebody_gives_up = seed % 4 == 0;
  const bool gives_up = somebody_gives_up && static_cast<int>(seed / 4 % size) == i;
  const int how = static_cast<int>(seed / 64 % kGivesUps);
  const int maker = (i + static_cast<int>(seed % 2)) % plan_.workers;  // of contexts
  Doing doing{what, process, {}};
  for (int k = 0; k < plan_.workers; ++k) doing.workers.insert(k);
  {
    absl::MutexLock lock(&mu_);
    barriers_[i].averages = true;
  }
  const absl::Cleanup is_over = [this, i] {
    absl::MutexLock lock(&mu_);
    barriers_[i].averages = false;
  };
  const auto check = [&](absl::string_view of, const absl::Status& status, Deadline deadline,
                         bool may_fail) {
    // Who was killed joins no group any more, also when it is back. And nobody hears of a machine
    // that is gone.
    // Or somebody has joined, and waits in the first collective for one that died as it did.
    const bool is_awaited =
        of == kJoining || of == kMaking ? LacksOne(size) : killed_silently_.load();
    const bool says_who = absl::StrContains(status.message(), "rank ") ||
                          absl::StrContains(status.message(), "not join in time");
    if (absl::IsDeadlineExceeded(status) && is_awaited && says_who) return false;
    // What rank 0 tells those who join.
    const bool is_untold = absl::IsNotFound(status) &&
                           absl::StrContains(status.message(), "in the job's store in time");
    if (of == kJoining && is_untold && is_awaited) return false;
    CheckEnd(doing.Part(of), status, deadline, Terms{.planned = may_fail || LacksOne(size)});
    return status.ok();
  };

  const auto rank = std::make_shared<Rank>();
  auto group = ProcessGroup::Create({.name = absl::StrCat("replicas", action.a),
                                     .store = process->store,
                                     .rank = i,
                                     .size = size,
                                     .timeout = kGroupTimeout,
                                     .join_timeout = 2 * kTimeout,
                                     .host = process->host->address()});
  if (!check(kJoining, group.status(), Deadline::Never(), false)) return;
  rank->group = *std::move(group);
  std::vector<NamedTensor> named;
  for (int k = 0; k < kReplicated; ++k) {
    rank->parameters.push_back(Constant(0.3 * (k + 1) + i).set_requires_grad(true));
    named.push_back({absl::StrCat("parameter", k), rank->parameters.back()});
  }
  auto averager = GradientAverager::Create(rank->group, named, {},
                                           {.bucket_bytes = seed % 3 == 0 ? 1000u : 40u,
                                            .first_bucket_bytes = 40,
                                            .in_backward = false});
  if (!check(kMaking, averager.status(), Deadline::Never(), false)) return;
  rank->averager = *std::move(averager);
  for (int k = 0; k < kReplicated; ++k) {
    if (at::allclose(rank->parameters[k], Constant(0.3 * (k + 1)))) continue;
    Wrong(absl::StrCat(what, ": parameter ", k, " is not that of rank 0"));
  }
  const std::string key = absl::StrCat(action.a, "/", process->number);
  {
    absl::MutexLock lock(&mu_);
    ranks_[key] = rank;
  }

  // False if this rank goes on no more.
  const auto run_step = [&](int step) {
    const bool is_last = step + 1 == action.b;
    const bool may_fail = is_last && somebody_gives_up;
    StepOfRank mine(seed, i, step);
    if (is_last && gives_up) {
      if (how == kWithoutAWord) return false;
      mine.follows = true;
    }
    const std::string payload = absl::StrCat(action.a, "/", step);
    const std::shared_ptr<Process> owner = ProcessAt(maker);
    if (owner == nullptr) {
      rank->group->Fail(absl::UnavailableError("whoever makes the contexts is dead"));
      return false;
    }
    doing.process = owner.get();
    const InProcess in_owner(owner->number);
    Context context = owner->worker->NewContext();
    const auto call = [&](const char* function, Tensors tensors) {
      const Deadline deadline = Deadline::After(kGroupTimeout + kTimeout);
      absl::StatusOr<Message> reply =
          owner->worker->Call(WorkerName(i), function, {payload, std::move(tensors)},
                              {.context = &context, .deadline = deadline});
      if (!check(absl::StrCat("step ", step, ", ", function), reply.status(), deadline, may_fail)) {
        rank->group->Fail(absl::AbortedError(reply.status().message()));
      }
      return reply;
    };
    const at::Tensor x = mine.x.clone().set_requires_grad(true);
    if (mine.follows && !call("follow", {}).ok()) return false;
    const absl::StatusOr<Message> y = call("replica", {x});
    if (!y.ok()) return false;
    const Deadline deadline = Deadline::After(kGroupTimeout + kTimeout);
    const Future<Unit> backward =
        context.BackwardAsync({y->tensors.at(0).sum()}, {.deadline = deadline});
    if (is_last && gives_up && how == kInBackward) {
      absl::SleepFor(absl::Microseconds(Draw() % 3000));
      context.Release();
      backward.Wait().status().IgnoreError();
      absl::SleepFor(absl::Seconds(5));
      rank->group->Fail(absl::CancelledError("given up"));
      return false;
    }
    const absl::Status done = backward.Wait().status();
    if (!check(absl::StrCat("step ", step, ", its pass"), done, deadline, may_fail)) {
      rank->group->Fail(absl::AbortedError(done.message()));
      return false;
    }
    if (is_last && gives_up) {
      context.Release();
      for (int k = 0; k < 100 && rank->group->status().ok(); ++k) {
        absl::SleepFor(absl::Milliseconds(100));
      }
      const bool has_begun = mine.used == (1 << kReplicated) - 1 || (mine.used & 4) != 0;
      if (!IsDisturbed(doing) && has_begun && rank->group->status().ok()) {
        Wrong(absl::StrCat(what, ": a context that was followed has ended, and nobody was told"));
      }
      rank->group->Fail(absl::CancelledError("given up"));
      return false;
    }
    const absl::StatusOr<Message> averages = call("average", {});
    if (!averages.ok()) return false;
    // The same here, by libtorch alone.
    Tensors sums(kReplicated);
    for (int other = 0; other < size; ++other) {
      const StepOfRank its(seed, other, step);
      Tensors leaves;
      for (const at::Tensor& parameter : rank->parameters) {
        leaves.push_back(parameter.detach().clone().set_requires_grad(true));
      }
      if (its.used == 0) continue;
      const Tensors gradients =
          torch::autograd::grad({its.Compute(its.x, leaves).sum()}, leaves, {}, std::nullopt, false,
                                /*allow_unused=*/true);
      for (int k = 0; k < kReplicated; ++k) {
        if (!gradients[k].defined()) continue;
        sums[k] = sums[k].defined() ? sums[k].add(gradients[k]) : gradients[k];
      }
    }
    const at::NoGradGuard no_grad;
    for (int k = 0; k < kReplicated; ++k) {
      const bool right =
          averages->payload[k] == (sums[k].defined() ? '1' : '0') &&
          (!sums[k].defined() || at::allclose(averages->tensors[k], sums[k].div(size)));
      if (!right) Wrong(absl::StrCat(what, ", step ", step, ": average ", k, " is wrong"));
      if (sums[k].defined()) rank->parameters[k].sub_(sums[k].div(size), 0.5);
    }
    return true;
  };
  bool goes_on = true;
  for (int step = 0; goes_on && step < action.b; ++step) goes_on = run_step(step);
  if (goes_on) {
    doing.process = process;
    const Deadline deadline = Deadline::After(kGroupTimeout);
    const at::Tensor value = Constant(i);
    const absl::Status averaged = rank->group->Average({value});
    if (check("its last average", averaged, deadline, somebody_gives_up) &&
        !at::allclose(value, Constant((size - 1) / 2.0))) {
      Wrong(absl::StrCat(what, ": an average is wrong"));
    }
  }
  absl::MutexLock lock(&mu_);
  ranks_.erase(key);
}

// A dead worker is no reason: it is found to be lost. One that has come back is, for nobody runs
// its actions any more.
bool Job::ExplainsLate(int barrier, absl::string_view message) {
  bool names_one = false;
  for (int i = 0; i < plan_.workers; ++i) {
    if (!absl::StrContains(message, absl::StrCat("'", WorkerName(i), "'"))) continue;
    names_one = true;
    const bool is_back = processes_[i] != nullptr || coming_back_.count(i) > 0;
    if (ever_killed_.count(i) > 0 && is_back) continue;
    const Barriers& its = barriers_[i];
    if (its.come < barrier && (its.has_failed || (its.averages && !ever_killed_.empty()))) continue;
    return false;
  }
  return names_one;
}

void Job::RunBarrier(const Action& action, int i, Process* process) {
  const std::string what = absl::StrCat(Text(action), ", worker", i);
  const auto on_lost = static_cast<OnLost>(action.a);
  int number;
  {
    absl::MutexLock lock(&mu_);
    number = barriers_[i].passed + 1;
    barriers_[i].come = std::max(barriers_[i].come, number);
  }
  const Deadline deadline = Deadline::After(3 * kTimeout);
  const Doing doing = DoingOfAll(what, process);
  const absl::Status passed = process->worker->Barrier(deadline, on_lost);
  bool is_awaited = false;
  {
    absl::MutexLock lock(&mu_);
    barriers_[i].has_failed |= !passed.ok();
    if (passed.ok()) barriers_[i].passed = number;
    is_awaited = absl::IsDeadlineExceeded(passed) && ExplainsLate(number, passed.message());
  }
  if (!is_awaited) CheckEnd(doing, passed, deadline);
  if (!passed.ok()) return;
  for (int other = 0; other < plan_.workers; ++other) {
    const bool goes_without =
        on_lost == OnLost::kGoOnWithout && MayBeTakenForLost(other, doing.since);
    absl::MutexLock lock(&mu_);
    if (goes_without || barriers_[other].come >= number || ever_killed_.count(other) > 0) continue;
    if (wrong_.empty()) {
      wrong_ = absl::StrCat(what, ": it has passed barrier ", number, " before worker", other);
    }
  }
}

}  // namespace distgrad::simulation
