// Starts, disturbs and ends a job, and checks what is left of it.
#include "tests/simulation/job.h"

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/internal/sysinfo.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "core/autograd/state.h"
#include "core/base/check.h"
#include "core/membership/store/tcp_store.h"
#include "core/net/handshake.h"
#include "core/worker/metrics.h"
#include "tests/simulation/counting_clock.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/pipeline_model.h"
#include "tests/simulation/scheduler.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {
namespace {

// What ends by a deadline ends soon after it, however slow the threads are.
constexpr absl::Duration kSlack = absl::Seconds(5);
// At a standstill a worker has timers for its heartbeats, for the member that it watches, for the
// earliest deadline that a call has had, to read what has become of members, and to take back that
// it is lost. And the clock has a count of them.
constexpr long kMostTimers = 5 + 1;
constexpr absl::Duration kLongestHold = absl::Seconds(8);
// A process that is stopped for no longer is silent for less than four fifths of the limit.
constexpr absl::Duration kUnnoticed = absl::Seconds(2);
// From the end of a fault until nothing fails of it any more: it is noticed within the limit, by
// one end after the other. Of a dead connection for large packets the answers are waited for twice
// as long (docs/membership.md, "Heartbeats").
constexpr int64_t kCalmLimits = 2, kCalmLimitsOfDead = 3;

// Whether a text has this name, and not only one that begins with it.
bool Names(absl::string_view text, absl::string_view name) {
  size_t at = 0;
  while ((at = text.find(name, at)) != absl::string_view::npos) {
    at += name.size();
    if (at == text.size() || !absl::ascii_isdigit(static_cast<unsigned char>(text[at]))) {
      return true;
    }
  }
  return false;
}

NetworkOptions NetworkOf(const Plan& plan) {
  NetworkOptions options;
  options.system_timeout = absl::ToChronoNanoseconds(kHeartbeatLimit);  // as workers set it
  if ((plan.faults & kSlowPackets) != 0) {
    options.slow_one_in = 8;
    options.large_per_ms = 1000;
  }
  return options;
}

SocketOptions SocketsOf(const Plan& plan) {
  SocketOptions options;
  if ((plan.faults & kSlowPackets) != 0) options.slow_one_in = 8;
  if ((plan.faults & kStoreFaults) != 0) {
    options.break_one_in = options.refuse_one_in = 40;
    options.split_one_in = 4;
  }
  return options;
}

}  // namespace

void Must(const absl::Status& status) { DG_CHECK(status.ok()) << status; }

at::Tensor Constant(double value) { return at::full({2, 2}, value, at::kDouble); }

at::Tensor Forward(const at::Tensor& x, const at::Tensor& parameter) {
  return at::add(at::tanh(at::mm(x, parameter)), x);
}

Job::Job(const Plan& plan)
    : plan_(plan),
      network_(std::make_shared<SimulatedNetwork>(plan.seed + 1, NetworkOf(plan))),
      keys_(std::make_shared<KeysEverSet>()),
      groups_(network_),
      processes_(plan.workers),
      barriers_(plan.workers) {
  SetSocketOptions(SocketsOf(plan));
  {
    const InProcess in_process(kLauncher);
    absl::StatusOr<std::unique_ptr<TcpStore>> store = NewTcpStore({.is_server = true});
    Must(store.status());
    store_ = *std::move(store);
  }
  const int most = std::max(plan.workers + plan.guests, kNewcomer + 1);
  for (int w = 0; w < most; ++w) {
    parameters_.emplace_back();
    for (int i = 0; i < kParameters; ++i) {
      parameters_.back().push_back(Constant(0.1 * (w % 6 + 1) + 0.03 * i).set_requires_grad(true));
    }
  }
  for (const Action& action : plan.actions) {
    has_newcomers_ |= action.kind == Action::kGuest || action.kind == Action::kProgram;
    if (action.kind != Action::kPipeline) continue;
    pipelines_[action.a] = std::make_unique<PipelineModel>(action, plan.workers);
  }
}

Job::~Job() = default;

void Job::Wrong(const std::string& what) {
  Note("wrong", 1);
  absl::MutexLock lock(&mu_);
  if (wrong_.empty()) wrong_ = what;
}

std::string Job::wrong() {
  absl::MutexLock lock(&mu_);
  return wrong_;
}

std::string Job::NameOf(int i) const {
  return IsGuest(i) ? absl::StrCat("guest", i - plan_.workers) : WorkerName(i);
}

std::shared_ptr<Process> Job::ProcessAt(int i) {
  absl::MutexLock lock(&mu_);
  return processes_[i];
}

std::shared_ptr<Worker> Job::WorkerAt(int i) {
  absl::MutexLock lock(&mu_);
  return processes_[i] == nullptr ? nullptr : processes_[i]->worker;
}

std::string Job::AddressOf(int i) {
  absl::MutexLock lock(&mu_);
  return processes_[i] == nullptr ? "" : processes_[i]->host->address();
}

void Job::Spawn(absl::AnyInvocable<void()> fn) {
  const MustStart must_start;
  std::thread thread(std::move(fn));
  absl::MutexLock lock(&mu_);
  spawned_.push_back(std::move(thread));
}

void Job::JoinSpawned() {
  while (true) {
    std::vector<std::thread> threads;
    {
      absl::MutexLock lock(&mu_);
      threads.swap(spawned_);
    }
    if (threads.empty()) return;
    for (std::thread& thread : threads) thread.join();
  }
}

absl::StatusOr<std::shared_ptr<Process>> Job::NewProcess(int i, const std::string& name,
                                                         bool joins) {
  auto process = std::make_shared<Process>();
  {
    absl::MutexLock lock(&mu_);
    members_.insert(name);
    process->number = ++numbers_;
  }
  const InProcess in_process(process->number);
  process->host = std::make_shared<SimulatedHost>(network_);
  absl::StatusOr<std::unique_ptr<TcpStore>> store =
      NewTcpStore({.port = store_->port(), .deadline = Deadline::After(kTimeout)});
  if (!store.ok()) return store.status();
  process->store = std::make_shared<StoreOfProcess>(process->number, *std::move(store), keys_);
  WorkerOptions options{.name = name,
                        .store = process->store,
                        .join = joins,
                        .rank = i,
                        .world_size = plan_.workers,
                        .transport = "inproc",
                        .network = process->host,
                        .thread_count = static_cast<size_t>(plan_.threads),
                        .timeout = kTimeout,
                        .heartbeat_limit = kHeartbeatLimit};
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(std::move(options));
  if (!worker.ok()) return worker.status();
  process->worker = *std::move(worker);
  for (const Member& member : process->worker->members()) {
    if (member.rank == process->worker->rank()) process->incarnation = member.incarnation;
  }
  process->timers = TimersOfNewestClock();
  RegisterAll(process.get(), i);
  return process;
}

absl::Status Job::StartWorker(int i, bool is_first) {
  auto process = NewProcess(i, WorkerName(i), /*joins=*/false);
  if (!process.ok()) return process.status();
  (*process)->is_first = is_first;
  absl::MutexLock lock(&mu_);
  processes_[i] = *std::move(process);
  return absl::OkStatus();
}

void Job::RegisterAll(Process* process, int i) {
  Worker* const worker = process->worker.get();
  RegisterCalls(worker, i);
  RegisterTraining(process);
  if (!IsGuest(i)) {
    RegisterAverages(*process, i);
    RegisterPipelines(process, i);
  }
  if (i <= kNewcomer) Must(DistributedFrame::Register(*worker, i));
}

void Job::KillWorker(int i, bool silently) {
  std::shared_ptr<Process> process;
  {
    absl::MutexLock lock(&mu_);
    process.swap(processes_[i]);
    if (process != nullptr) {
      ever_killed_.insert(i);
      deaths_[i] = disturbances_.size();
      disturbances_.push_back({Disturbance::kDeath, Deadline::Never(), i});
    }
  }
  if (process == nullptr) return;
  killed_ = true;
  if (silently) killed_silently_ = true;
  Note("kill", i);
  NoteDeath(*process);
  EndProcess(process.get(), silently);
}

void Job::EndProcess(Process* process, bool silently) {
  process->is_dead = true;
  network_->Kill(process->host->address(), silently);
  groups_.Kill(process->host->address(), silently);
  process->store->Kill(silently);
  // What is left of it here says nothing to anybody any more.
  process->worker->Abort();
}

void Job::ComeBack(const Action& action) {
  absl::SleepFor(absl::Milliseconds(action.c));
  size_t death;  // of the one that it replaces: once it is there it may die itself
  {
    absl::MutexLock lock(&mu_);
    if (processes_[action.a] != nullptr || !coming_back_.insert(action.a).second) return;
    death = deaths_[action.a];
  }
  StartAgain(action, "coming back", death).IgnoreError();
}

absl::Status Job::StartAgain(const Action& action, absl::string_view how, size_t death) {
  const Doing doing{absl::StrCat(Text(action), ", ", how), nullptr, {action.a}};
  const absl::Status started = StartWorker(action.a, /*is_first=*/false);
  {
    absl::MutexLock lock(&mu_);
    coming_back_.erase(action.a);
    if (started.ok()) disturbances_[death].until = Deadline::After(kCalmLimits * kHeartbeatLimit);
  }
  CheckEnd(doing, started, Deadline::Never());
  return started;
}

// As SIGSTOP does. What it does later, and what the others do then, must not be of any harm.
void Job::StopWorker(const Action& action) {
  const std::shared_ptr<Process> process = ProcessAt(action.a);
  if (process == nullptr) return;
  const auto lasts = absl::Milliseconds(action.c);
  if (lasts > kUnnoticed) {
    AddDisturbance(
        {Disturbance::kNetwork, Deadline::After(lasts + kCalmLimits * kHeartbeatLimit), action.a});
  }
  StopProcess(process->number, Now() + absl::ToInt64Nanoseconds(lasts));
  if (action.b < 0) return;
  Spawn([this, action, process, resumed = Deadline::After(lasts)] {
    StartElsewhere(action, process, resumed);
  });
}

void Job::StartElsewhere(const Action& action, const std::shared_ptr<Process>& old,
                         Deadline resumed) {
  absl::SleepFor(absl::Milliseconds(action.b));
  size_t death;
  {
    absl::MutexLock lock(&mu_);
    if (processes_[action.a] != old || !coming_back_.insert(action.a).second) return;
    ever_killed_.insert(action.a);
    death = disturbances_.size();
    disturbances_.push_back({Disturbance::kDeath, Deadline::Never(), action.a});
  }
  old->is_over = true;
  NoteDeath(*old, Deadline::Never());
  if (!StartAgain(action, "starting elsewhere", death).ok()) {
    killed_ = true;  // whether the old one is still a member is not known
    return;
  }
  absl::SleepFor(resumed.Left() + absl::Milliseconds(Draw() % 3000));
  CheckIsOver(action.a, old.get());
  absl::SleepFor(absl::Milliseconds(Draw() % 5000));
  // Who has not heard of the new one may talk with the old one to the end.
  AddDisturbance({Disturbance::kDeath, Deadline::After(kCalmLimits * kHeartbeatLimit), action.a});
  EndProcess(old.get(), /*silently=*/false);
}

void Job::CheckIsOver(int i, Process* old) {
  const InProcess in_process(old->number);
  const uint64_t first = Draw();
  for (uint64_t k = 0; k < 3; ++k) {
    const uint64_t which = (first + k) % 3;
    const Doing doing = DoingOfAll(absl::StrCat(NameOf(i), ", started elsewhere, calls ",
                                                which == 0   ? "Barrier()"
                                                : which == 1 ? "Leave()"
                                                             : "Shutdown()"),
                                   old);
    const Deadline deadline = Deadline::After(kTimeout);
    absl::Status status;
    if (which == 0) {
      {
        absl::MutexLock lock(&mu_);
        barriers_[i].come = std::max(barriers_[i].come, barriers_[i].passed + 1);
      }
      status = old->worker->Barrier(deadline);
    } else {
      status = which == 1 ? old->worker->Leave(deadline) : old->worker->Shutdown(deadline);
    }
    Note(absl::StrCat(doing.what, ": ", status.ToString()).c_str(), which);
    if (old->is_dead) return;
    const bool says_so = absl::IsFailedPrecondition(status) &&
                         absl::StrContains(status.message(), "the worker has come back since");
    if (says_so || (!status.ok() && IsDisturbed(doing, Disturbance::kStore))) continue;
    Wrong(absl::StrCat(doing.what, ", and that gives ", status.ToString()));
  }
}

// A worker that joins, calls the others, is called, and leaves.
void Job::RunGuest(const Action& action) {
  const int i = plan_.workers + action.a;
  const Doing joining{Text(action) + ", joining", nullptr, {i}};
  absl::StatusOr<std::shared_ptr<Process>> process = NewProcess(i, NameOf(i), /*joins=*/true);
  CheckEnd(joining, process.status(), Deadline::Never());
  if (!process.ok()) return;
  const InProcess in_process((*process)->number);
  size_t absence;
  {
    absl::MutexLock lock(&mu_);
    absence = absences_.at(i);
  }
  EndAbsence(absence);
  const int someone = action.b % plan_.workers;
  RunCall({Action::kCall, i, someone, Action::kEcho}, process->get());
  RunPass({Action::kPass, i, action.b, Action::kByItself, 0}, process->get());
  // It often leaves while a pass of somebody else goes through it.
  if (const std::shared_ptr<Process> visitor = ProcessAt(someone); visitor != nullptr) {
    Spawn([this, someone, action, visitor] {
      const InProcess as_visited(visitor->number);
      RunPass({Action::kPass, someone, action.b, Action::kByItself, Action::kVisit}, visitor.get());
    });
  }
  absl::SleepFor(action.c % 2 == 0 ? absl::Milliseconds(action.c) : absl::Microseconds(action.c));
  EndGuest(Text(action), i, process->get());
}

void Job::EndGuest(const std::string& what, int i, Process* guest) {
  const Doing leaving = DoingOfAll(what + ", leaving", guest);
  const Deadline deadline = Deadline::After(2 * kTimeout);
  const InProcess in_process(guest->number);
  BeginAbsence(guest->worker->name());
  const absl::Status left = guest->worker->Leave(deadline);
  CheckEnd(leaving, left, deadline);
  if (left.ok()) return;
  // It stays a member, for whom others wait, and the job does not end in good order.
  AddDisturbance({Disturbance::kDeath, Deadline::Never(), i});
  killed_ = guest->is_dead = true;
  NoteDeath(*guest);
  network_->Kill(guest->host->address(), /*silently=*/false);
  guest->store->Kill(/*silently=*/false);
}

size_t Job::BeginAbsence(const std::string& name) {
  absl::MutexLock lock(&mu_);
  disturbances_.push_back(
      {.kind = Disturbance::kAbsence, .until = Deadline::Never(), .name = name});
  return disturbances_.size() - 1;
}

void Job::EndAbsence(size_t absence) {
  absl::MutexLock lock(&mu_);
  disturbances_[absence].until = Deadline::After(absl::ZeroDuration());
}

void Job::AddDisturbance(Disturbance disturbance) {
  absl::MutexLock lock(&mu_);
  disturbances_.push_back(std::move(disturbance));
}

bool Job::IsDisturbed(const Doing& doing, unsigned kinds) {
  const auto is_of = [&doing](int worker) {
    return worker == Disturbance::kAll || doing.workers.count(worker) > 0;
  };
  absl::MutexLock lock(&mu_);
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& each) {
    if ((each.kind & kinds) == 0 || each.until.at() < doing.since) return false;
    if (each.a == Disturbance::kAll) return true;
    // It meets nobody else: whoever waits for that one waits with it.
    if ((each.kind & (Disturbance::kStore | Disturbance::kThreads)) != 0) return is_of(each.a);
    return each.a != each.b && doing.workers.size() > 1 && is_of(each.a) && is_of(each.b);
  });
}

// Where no guest takes part an error has no reason to name one; nor has one that concerns a guest
// alone, as when it joins.
bool Job::NamesAbsent(const Doing& doing, absl::string_view message) {
  const bool has_guests = std::any_of(doing.workers.begin(), doing.workers.end(),
                                      [this](int worker) { return IsGuest(worker); });
  if (!has_guests || doing.workers.size() == 1) return false;
  absl::MutexLock lock(&mu_);
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& each) {
    return each.kind == Disturbance::kAbsence && each.until.at() > doing.since &&
           Names(message, each.name);
  });
}

bool Job::HasFaults(unsigned kinds) {
  absl::MutexLock lock(&mu_);
  return std::any_of(disturbances_.begin(), disturbances_.end(),
                     [kinds](const Disturbance& each) { return (each.kind & kinds) != 0; });
}

// Guests have their ranks in the order in which they joined, so that no rank says which one it is.
bool Job::MayBeTakenForLost(int rank, Deadline::Clock::time_point since) {
  absl::MutexLock lock(&mu_);
  return std::any_of(disturbances_.begin(), disturbances_.end(), [&](const Disturbance& each) {
    if (each.until.at() < since) return false;
    if (each.kind == Disturbance::kDeath)
      return each.a == rank || (IsGuest(rank) && IsGuest(each.a));
    // One that cannot ask the store holds the connections of those that it does not know; one that
    // has no thread for that refuses them.
    if (each.kind == Disturbance::kStore || each.kind == Disturbance::kThreads) {
      return each.a == rank || each.a == Disturbance::kAll;
    }
    return each.kind == Disturbance::kNetwork &&
           (each.a == rank || each.b == rank || each.b == Disturbance::kAll);
  });
}

Job::Doing Job::DoingOfAll(const std::string& what, const Process* process) const {
  Doing doing{what, process, {}};
  const int guests = has_newcomers_ ? std::max(plan_.guests, 1) : 0;
  for (int i = 0; i < plan_.workers + guests; ++i) doing.workers.insert(i);
  return doing;
}

void Job::CheckEnd(const Doing& doing, const absl::Status& status, Deadline deadline, Terms terms) {
  Note(absl::StrCat("ended: ", doing.what, ": ", status.ToString()).c_str(),
       static_cast<uint64_t>(status.code()));
  if (!deadline.is_never()) {
    // Whoever is stopped sees nothing of the time.
    const auto late = std::min(absl::FromChrono(Deadline::Clock::now() - deadline.at()),
                               absl::Nanoseconds(Now() - LastStopOfProcess()));
    if (late > kSlack) {
      Wrong(absl::StrCat(doing.what, ": ended ", absl::FormatDuration(late),
                         " after its deadline, with ", status.ToString()));
    }
  }
  if (status.ok()) return;
  const std::string why = Unexplained(doing, status, terms);
  if (!why.empty()) Wrong(absl::StrCat(doing.what, ": ", why, ": ", status.ToString()));
}

std::string Job::Unexplained(const Doing& doing, const absl::Status& status, Terms terms) {
  using Code = absl::StatusCode;
  const absl::StatusCode code = status.code();
  const auto says = [&status](absl::string_view text) {
    return absl::StrContains(status.message(), text);
  };
  if (status.message().empty()) return "an error that says nothing";
  // A process that was killed says nothing; this is what its functions return here.
  const bool is_dead = (doing.process != nullptr && doing.process->is_dead) ||
                       (terms.anywhere && IsDisturbed(doing, Disturbance::kDeath));
  if (is_dead && (says("this worker is shutting down") || says("this process is dead"))) return "";
  // Of one whose worker has been started elsewhere the others take nothing any more.
  if (doing.process != nullptr && doing.process->is_over &&
      (code == Code::kUnavailable || code == Code::kFailedPrecondition ||
       code == Code::kCancelled)) {
    return "";
  }
  if (terms.ending == Action::kByDeadline && code == Code::kDeadlineExceeded) return "";
  // A handler's own nested call hears of it as a cancel.
  if (terms.ending != Action::kByItself && code == Code::kCancelled) return "";
  if (terms.ending == Action::kByRelease && code == Code::kFailedPrecondition) return "";
  if (code == Code::kResourceExhausted && says("thread") &&
      IsDisturbed(doing, Disturbance::kThreads)) {
    return "";
  }
  switch (code) {
    case Code::kUnavailable:
      if (!says("newcomer") && !says("the job's store") && !says("process group") &&
          std::none_of(doing.workers.begin(), doing.workers.end(),
                       [&](int worker) { return says(NameOf(worker)); })) {
        return "it names nobody";
      }
      // It may not be there yet, or not any more.
      if (NamesAbsent(doing, status.message())) return "";
      break;
    case Code::kNotFound:
      if (NamesAbsent(doing, status.message())) return "";
      // A worker that has just come back, or has none of what it had before.
      if ((says("no such function") || says("has no gradient") || says("there is no rank") ||
           says("needs a part of this optimizer") || says("has no PipelineStages") ||
           says("has no such step")) &&
          IsDisturbed(doing, Disturbance::kDeath)) {
        return "";
      }
      return "nothing explains it";
    case Code::kCancelled:
    case Code::kFailedPrecondition:
      // A call on its way, or a context that has failed elsewhere.
      if (!says("cancelled by its caller") && !says("released")) return "it is not a fault's";
      break;
    default:
      return "nothing explains it";
  }
  return terms.planned || IsDisturbed(doing) ? "" : "nothing explains it";
}

void Job::Act(const Action& action) {
  Note(Text(action).c_str(), static_cast<uint64_t>(action.kind));
  if (action.kind == Action::kPause) return absl::SleepFor(absl::Milliseconds(action.a));
  const std::shared_ptr<Process> process = ProcessAt(action.actor);
  if (process == nullptr) return;
  const InProcess in_process(process->number);
  switch (action.kind) {
    case Action::kProgram:
      return RunProgram(action, process.get());
    case Action::kCall:
      return RunCall(action, process.get());
    case Action::kPass:
      return RunPass(action, process.get());
    case Action::kBurst:
      return RunBurst(action, process.get());
    case Action::kCrowd:
      return RunCrowd(action, process.get());
    case Action::kAwait:
      return RunAwait(action, process.get());
    case Action::kTrain:
      return RunTrain(action, process.get());
    case Action::kPipeline:
      return RunPipeline(action, process.get());
    case Action::kLook:
      return RunLook(action, process.get());
    case Action::kWatch:
      return RunWatch(process.get());
    case Action::kUpdate: {
      const Doing doing{Text(action), process.get(), {action.actor}};
      return CheckEnd(doing, process->worker->UpdateMembers(), Deadline::Never());
    }
    default:
      return;
  }
}

// The actions of all, on one worker, for as long as it lives.
void Job::ActWithAll(int i) {
  const std::shared_ptr<Process> process = ProcessAt(i);
  if (process == nullptr) return;
  const InProcess in_process(process->number);
  for (const Action& action : plan_.actions) {
    if (action.actor != Action::kAll) continue;
    if (ProcessAt(i) != process) return;
    Note(Text(action).c_str(), static_cast<uint64_t>(i));
    if (Draw() % 2 == 0) absl::SleepFor(absl::Microseconds(Draw() % 20000));
    if (action.kind == Action::kAverages) {
      RunAverages(action, i, process.get());
    } else {
      RunBarrier(action, i, process.get());
    }
  }
}

void Job::Disturb(const Action& action) {
  Note(Text(action).c_str(), static_cast<uint64_t>(action.kind));
  const auto lasts = absl::Milliseconds(std::abs(action.c));
  const auto later = [&] { return Deadline::After(lasts).at(); };
  const Deadline calm_of_dead = Deadline::After(kCalmLimitsOfDead * kHeartbeatLimit);
  const Deadline calm = Deadline::After(lasts + kCalmLimits * kHeartbeatLimit);
  switch (action.kind) {
    case Action::kPause:
      return absl::SleepFor(absl::Milliseconds(action.a));
    case Action::kCut:
      AddDisturbance({Disturbance::kNetwork, calm_of_dead, action.a, action.b});
      return network_->Cut(AddressOf(action.a), AddressOf(action.b), action.c != 0);
    case Action::kDeafen:
      AddDisturbance({Disturbance::kNetwork, calm_of_dead, action.a, action.b});
      return network_->Deafen(AddressOf(action.a), AddressOf(action.b));
    case Action::kFailOpen:
      AddDisturbance({Disturbance::kNetwork, calm, action.a});
      return network_->FailConnects(AddressOf(action.a), later(), action.b != 0);
    case Action::kChoke:
      AddDisturbance({Disturbance::kNetwork, calm_of_dead, action.a, action.b});
      return network_->Choke(AddressOf(action.a), AddressOf(action.b));
    case Action::kHold:
      AddDisturbance({Disturbance::kNetwork, calm, action.a, action.b});
      network_->Hold(AddressOf(action.a), AddressOf(action.b), later());
      if (action.c > 0) network_->Hold(AddressOf(action.b), AddressOf(action.a), later());
      return;
    case Action::kOutage: {
      const bool is_for_all = action.a == action.b;
      AddDisturbance({Disturbance::kStore, calm, is_for_all ? Disturbance::kAll : action.a});
      const int64_t until = Now() + absl::ToInt64Nanoseconds(lasts);
      if (is_for_all) return CutOffSockets(kAllProcesses, until);
      const std::shared_ptr<Process> process = ProcessAt(action.a);
      if (process != nullptr) CutOffSockets(process->number, until);
      return;
    }
    case Action::kKill:
      KillWorker(action.a, action.b != 0);
      if (action.c >= 0) Spawn([this, action] { ComeBack(action); });
      return;
    case Action::kStop:
      return StopWorker(action);
    case Action::kGuest:
      return Spawn([this, action] { RunGuest(action); });
    case Action::kClock:
      return MoveWallClock(int64_t{action.a} * 1000000);
    case Action::kRefuse: {
      AddDisturbance({Disturbance::kThreads, calm, action.a});
      const std::shared_ptr<Process> process = ProcessAt(action.a);
      if (process == nullptr) return;
      return RefuseThreads(process->number, Now() + int64_t{action.c} * 1000000);
    }
    default:
      return;
  }
}

void Job::CheckNothingIsLeft() {
  // All that anybody waits for has a deadline, or a heartbeat.
  const Deadline end = Deadline::After(kTimeout + 3 * kHeartbeatLimit + absl::Seconds(20));
  std::string left;
  do {
    left.clear();
    for (int i = 0; i < plan_.workers; ++i) {
      const std::shared_ptr<Process> process = ProcessAt(i);
      if (process == nullptr) continue;
      const std::shared_ptr<Worker>& worker = process->worker;
      for (const ContextState& context : worker->Contexts()) {
        absl::StrAppend(&left, worker->name(), " has a context with ", context.sends, " sends, ",
                        context.receives, " recvs and ", context.passes.size(), " passes; ");
      }
      const WorkerMetrics metrics = worker->Metrics();
      for (const CallStats& calls : metrics.calls) {
        if (calls.in_flight == 0) continue;
        absl::StrAppend(&left, worker->name(), " has ", calls.in_flight, " calls of ",
                        calls.function, calls.served ? " from " : " to ", calls.peer, "; ");
      }
      for (const auto& [peer, bytes] : metrics.queued_bytes) {
        // They have the credit of the send window. Who watches a member that is gone goes on asking
        // for it.
        if (bytes == 0 || (peer < plan_.workers && WorkerAt(peer) == nullptr)) continue;
        absl::StrAppend(&left, worker->name(), " has ", bytes, " bytes to ", peer, "; ");
      }
      if (metrics.passes_in_flight != 0) {
        absl::StrAppend(&left, worker->name(), " has ", metrics.passes_in_flight, " passes; ");
      }
    }
    if (left.empty()) return CheckTimers();
    absl::SleepFor(absl::Milliseconds(250));
  } while (!end.Passed());
  Wrong(absl::StrCat("left over: ", left, network_->Text()));
}

// At once, for a deadline that was forgotten passes in the end.
void Job::CheckTimers() {
  for (int i = 0; i < plan_.workers; ++i) {
    const std::shared_ptr<Process> process = ProcessAt(i);
    if (process == nullptr) continue;
    // One that fires just now counts until what it does is done, which may set it again, on a
    // thread that may stand still (kStalls).
    for (int k = 0; k < 500 && process->timers.use_count() > kMostTimers; ++k) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    if (process->timers.use_count() <= kMostTimers) continue;
    Wrong(absl::StrCat(NameOf(i), " has ", process->timers.use_count() - 1,
                       " timers, and nothing that it waits for"));
  }
}

void Job::CheckAllIsWell() {
  for (int from = 0; from < plan_.workers; ++from) {
    for (int to = 0; to < plan_.workers; ++to) {
      const std::shared_ptr<Worker> caller = WorkerAt(from);
      if (caller == nullptr || WorkerAt(to) == nullptr) continue;
      absl::StatusOr<Message> reply;
      // The first call to one that has come back may meet a connection with what it was before.
      for (int i = 0; i < 2; ++i) {
        reply = caller->Call(WorkerName(to), "echo", {"well?", {}},
                             {.deadline = Deadline::After(absl::Seconds(10))});
        if (reply.ok()) break;
      }
      // One that has come back may have to ask the others first.
      const Deadline end = Deadline::After(2 * kHeartbeatLimit);
      while (reply.ok()) {
        const Context context = caller->NewContext();
        reply = caller->Call(WorkerName(to), "echo", {"in a context?", {}}, {.context = &context});
        if (!absl::IsUnavailable(reply.status()) || end.Passed()) break;
        reply = Message();
        absl::SleepFor(absl::Milliseconds(100));
      }
      if (!reply.ok()) {
        Wrong(absl::StrCat("when all is over, a call from ", from, " to ", to, ": ",
                           reply.status().ToString(), "; ", network_->Text()));
      }
    }
  }
}

// Which keys the store has at the end follows from which workers and groups there were, and not
// from how often they did something: a barrier's keys go with the next one, say. docs/membership.md
// has the keys of a job.
void Job::CheckStore() {
  std::vector<std::string> ever, keys, unexplained;
  {
    absl::MutexLock lock(&keys_->mu);
    ever.assign(keys_->keys.begin(), keys_->keys.end());
  }
  const auto values = store_->GetEach(ever, Deadline::After(kTimeout));
  if (!values.ok())
    return Wrong(absl::StrCat("in the end the store says ", values.status().ToString()));
  for (size_t i = 0; i < ever.size(); ++i) {
    if ((*values)[i].has_value()) keys.push_back(ever[i]);
  }
  absl::c_copy_if(keys, std::back_inserter(unexplained),
                  [this](const std::string& key) { return !ExplainsKey(key); });
  if (unexplained.empty()) return;
  Wrong(absl::StrCat("nothing explains that the store has ", absl::StrJoin(unexplained, ", "),
                     "; it has ", absl::StrJoin(keys, ", ")));
}

bool Job::ExplainsKey(absl::string_view key) {
  static const auto* const of_start = new std::set<absl::string_view>{
      "joiners", "joined", "all", "ready", "settled", "outcome", "size"};
  const std::vector<absl::string_view> words = absl::StrSplit(key, '/');
  const absl::string_view kind = words[0];
  if (words.size() == 1) {
    if (kind == "changes") return has_newcomers_ || HasFaults();
    return of_start->count(kind) > 0;
  }
  if (kind == "group") return ExplainsKeyOfGroup(words);
  int number = -1;
  const bool has_number = absl::SimpleAtoi(words[1], &number) && number >= 0;
  const bool of_count = words.back() == "count" || words.back() == "open";
  if (kind == "lost") {
    return words.size() == 2 && has_number && MayBeTakenForLost(number);
  }
  if (kind == "barrier" && words.size() == 3 && has_number && of_count) {
    const bool is_late =
        HasFaults(Disturbance::kNetwork | Disturbance::kStore | Disturbance::kDeath);
    absl::MutexLock lock(&mu_);
    int come = 0, passed = 0;
    for (const Barriers& each : barriers_) {
      come = std::max(come, each.come);
      passed = std::max(passed, each.passed);
    }
    // Those before the last one that was opened are deleted, once: by a process that dies
    // meanwhile, or does not reach the store, they are not. Who was taken for lost is counted
    // when nobody counts any more.
    return number > 0 && number <= come && (number >= passed || is_late);
  }
  const bool is_end = kind == "shutdown" || kind == "finish";
  if (is_end || kind == "left") {
    // In the end worker 0 alone waits.
    const bool is_rank = has_number && number < (is_end ? plan_.workers : 1);
    return words.size() == 2 && (of_count || is_rank);
  }
  absl::MutexLock lock(&mu_);
  if (kind == "worker") {
    return has_number && number < static_cast<int>(members_.size()) &&
           (words.size() == 2 || (words.size() == 3 && words[2] == "incarnations"));
  }
  if (kind == "at") {
    return words.size() == 2 && has_number && number < plan_.workers && barriers_[number].come > 0;
  }
  return (kind == "name" || kind == "claimed") && words.size() == 2 &&
         members_.count(std::string(words[1])) > 0;
}

// "group/NAME/", and then of how its ranks meet and number the start, or of that start.
bool Job::ExplainsKeyOfGroup(absl::Span<const absl::string_view> words) const {
  const auto starts =
      std::count_if(plan_.actions.begin(), plan_.actions.end(), [&](const Action& action) {
        return action.kind == Action::kAverages && words[1] == absl::StrCat("replicas", action.a);
      });
  if (words.size() < 4) return false;
  const absl::string_view what = words[3];
  int rank = -1;
  const bool has_rank = words.size() == 5 && absl::SimpleAtoi(words[4], &rank) && rank >= 0 &&
                        rank < std::min(plan_.workers, kMostRanks);
  if (words[2] == "start") {
    if (starts == 0) return false;
    if (what == "count") return words.size() == 4;
    if (what == "keys") return has_rank;
    return has_rank && rank > 0 && (what == "ask" || what == "answer" || what == "heard");
  }
  int start = 0;
  if (!absl::SimpleAtoi(words[2], &start) || start < 1 || start > starts) return false;
  if (what == "security" && has_rank) return true;
  return words.size() == 4 && (what == "room" || what == "failure" || what == "security");
}

std::string Job::Run() {
  for (int i = 0; i < plan_.workers; ++i) {
    Spawn([this, i] {
      const absl::Status started = StartWorker(i, /*is_first=*/true);
      if (!started.ok()) Wrong(absl::StrCat("start of ", i, ": ", started.ToString()));
    });
  }
  JoinSpawned();
  if (!wrong().empty()) return wrong();
  Note("started", plan_.workers);
  for (int i = plan_.workers; i < plan_.workers + plan_.guests; ++i) {
    const size_t absence = BeginAbsence(NameOf(i));
    absl::MutexLock lock(&mu_);
    absences_[i] = absence;
  }
  // All have registered their functions by now.
  const auto is_there = [this](int actor) {
    return std::any_of(plan_.actions.begin(), plan_.actions.end(),
                       [actor](const Action& action) { return action.actor == actor; });
  };
  for (int actor = Action::kFate; actor < plan_.workers; ++actor) {
    if (!is_there(actor)) continue;
    Spawn([this, actor] {
      for (const Action& action : plan_.actions) {
        if (action.actor != actor) continue;
        if (actor == Action::kFate) {
          Disturb(action);
        } else {
          Act(action);
        }
      }
    });
  }
  for (int i = 0; is_there(Action::kAll) && i < plan_.workers; ++i) {
    Spawn([this, i] { ActWithAll(i); });
  }
  JoinSpawned();
  Calm();
  CalmSockets();
  EndRefusals();
  Note("acted", 0);
  // Those who took each other for lost find that they are not.
  if (HasFaults()) absl::SleepFor(kLongestHold + 3 * kHeartbeatLimit);
  CheckNothingIsLeft();
  CheckHeard();
  CheckTrained();
  Note("quiet", 0);
  CheckAllIsWell();
  CheckStagesAreFree();
  for (int i = 0; i < plan_.workers; ++i) {
    Spawn([this, i] {
      std::shared_ptr<Process> process;
      {
        absl::MutexLock lock(&mu_);
        process.swap(processes_[i]);
      }
      if (process == nullptr) return;
      const InProcess in_process(process->number);
      // Of those that were killed the others find that they are lost.
      const absl::Status ended = process->worker->Shutdown(
          Deadline::After(absl::Minutes(1)), killed_ ? OnLost::kGoOnWithout : OnLost::kFail);
      if (!ended.ok()) Wrong(absl::StrCat("the end of ", i, ": ", ended.ToString()));
    });
  }
  JoinSpawned();
  CheckStore();
  store_.reset();
  const size_t left = network_->ends() + OpenSockets();
  if (left != 0) Wrong(absl::StrCat(left, " ends of connections are left"));
  return wrong();
}

std::string RunJob(absl::string_view order, Course* course) {
  const Plan plan = ReadPlan(order);
  Schedule schedule{.seed = plan.seed, .trace = plan.trace, .fibers = plan.fibers};
  if ((plan.faults & kPreemption) != 0) {
    schedule.preempt_one_in = 1 << (2 + plan.seed % 6);
    schedule.spurious_one_in = 50;
  }
  if ((plan.faults & kStalls) != 0) {
    const auto has = [&plan](const auto& is) {
      return std::any_of(plan.actions.begin(), plan.actions.end(), is);
    };
    const bool hurries =
        has([](const Action& action) { return action.kind == Action::kBurst && action.b != 0; });
    // Between the messages that start two steps in flight each rank is asked, one after the other.
    // Where there are dozens of workers, all that they do together would outlast every deadline.
    const bool steps = plan.workers <= kWorkers &&
                       has([](const Action& action) { return action.kind == Action::kPipeline; });
    schedule.stall_one_in = hurries ? 40 : 200;
    schedule.longest_stall = steps ? 200000000 : 20000000;
  }
  // libtorch makes its pool anew in a process that was forked off, when it is first asked for, and
  // not safely.
  at::set_num_threads(1);
  Begin(schedule);
  std::string wrong;
  {
    Job job(plan);
    wrong = job.Run();
  }
  *course = End();
  return wrong;
}

void WarmUp() {
  at::set_num_threads(1);
  // OpenSSL makes its tables when it is first used.
  for (const auto role : {Handshake::Role::kClient, Handshake::Role::kServer}) {
    Must(Handshake::Create(role, ClusterKey(), Token(), /*certificates=*/false).status());
  }
  // absl measures it when it first has threads wait, by the true time.
  absl::base_internal::NominalCPUFrequency();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    State local;
    for (int w = 0; w <= kWorkers; ++w) {
      local.parameters.emplace_back();
      for (int i = 0; i < kParameters; ++i) {
        local.parameters.back().push_back(Constant(0.1 * (w + 1)).set_requires_grad(true));
      }
    }
    LocalFrame(&local, 0).Run(RandomProgram(seed, kAllFeatures & ~kNewcomers), {}, {});
  }
}

}  // namespace distgrad::simulation
