// Starts, disturbs and ends a job, and checks what is left of it.
#include "tests/simulation/job.h"

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/base/internal/sysinfo.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "core/autograd/state.h"
#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"
#include "core/worker/metrics.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/pipeline_model.h"
#include "tests/simulation/scheduler.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {
namespace {

// What ends by a deadline ends soon after it, however slow the threads are.
constexpr absl::Duration kSlack = absl::Seconds(5);
constexpr absl::Duration kLongestHold = absl::Seconds(8);

NetworkOptions NetworkOf(const Plan& plan) {
  NetworkOptions options;
  options.system_timeout = absl::ToChronoNanoseconds(kHeartbeatLimit);  // as workers set it
  if ((plan.faults & kSlowPackets) != 0) {
    options.slow_one_in = 8;
    options.large_per_ms = 1000;
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
      weather_(std::make_shared<StoreWeather>(plan.seed + 2)),
      store_(NewInProcessStore()),
      groups_(network_),
      processes_(plan.workers),
      barriers_(plan.workers) {
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
  process->host = std::make_shared<SimulatedHost>(network_);
  process->store = std::make_shared<SimulatedStore>(store_, weather_);
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
    RegisterAverages(worker, i);
    RegisterPipelines(process, i);
  }
  if (i <= kNewcomer) Must(DistributedFrame::Register(*worker, i));
}

void Job::KillWorker(int i, bool silently) {
  std::shared_ptr<Process> process;
  {
    absl::MutexLock lock(&mu_);
    process.swap(processes_[i]);
    if (process != nullptr) ever_killed_.insert(i);
  }
  if (process == nullptr) return;
  disturbed_ = killed_ = true;
  if (silently) killed_silently_ = true;
  Note("kill", i);
  NoteDeath(*process);
  network_->Kill(process->host->address(), silently);
  groups_.Kill(process->host->address(), silently);
  process->store->Kill();
  // What is left of it here says nothing to anybody any more.
  process->worker->Abort();
}

void Job::ComeBack(const Action& action) {
  absl::SleepFor(absl::Milliseconds(action.c));
  {
    absl::MutexLock lock(&mu_);
    if (processes_[action.a] != nullptr || !coming_back_.insert(action.a).second) return;
  }
  const absl::Status started = StartWorker(action.a, /*is_first=*/false);
  {
    absl::MutexLock lock(&mu_);
    coming_back_.erase(action.a);
  }
  CheckEnd(absl::StrCat(Text(action), ", coming back"), started, Deadline::Never());
}

// A worker that joins, calls the others, is called, and leaves.
void Job::RunGuest(const Action& action) {
  const int i = plan_.workers + action.a;
  const std::string what = Text(action);
  absl::StatusOr<std::shared_ptr<Process>> process = NewProcess(i, NameOf(i), /*joins=*/true);
  CheckEnd(what + ", joining", process.status(), Deadline::Never());
  if (!process.ok()) return;
  Worker* const worker = (*process)->worker.get();
  const int someone = action.b % plan_.workers;
  RunCall({Action::kCall, i, someone, Action::kEcho}, worker);
  RunPass({Action::kPass, i, action.b, Action::kByItself, 0}, worker);
  // It often leaves while a pass of somebody else goes through it.
  if (const std::shared_ptr<Process> visitor = ProcessAt(someone); visitor != nullptr) {
    Spawn([this, someone, action, visitor] {
      RunPass({Action::kPass, someone, action.b, Action::kByItself, Action::kVisit},
              visitor->worker.get());
    });
  }
  absl::SleepFor(action.c % 2 == 0 ? absl::Milliseconds(action.c) : absl::Microseconds(action.c));
  EndGuest(what, process->get());
}

void Job::EndGuest(const std::string& what, Process* guest) {
  const Deadline deadline = Deadline::After(2 * kTimeout);
  const absl::Status left = guest->worker->Leave(deadline);
  // It waits for the calls and contexts of others, who may be kept waiting themselves.
  if (!disturbed_ || !absl::IsDeadlineExceeded(left)) CheckEnd(what + ", leaving", left, deadline);
  if (left.ok()) return;
  // It stays a member, and the job does not end in good order.
  disturbed_ = killed_ = true;
  NoteDeath(*guest);
  network_->Kill(guest->host->address(), /*silently=*/false);
  guest->store->Kill();
}

void Job::CheckEnd(const std::string& what, const absl::Status& status, Deadline deadline,
                   Terms terms) {
  Note(absl::StrCat("ended: ", what, ": ", status.ToString()).c_str(),
       static_cast<uint64_t>(status.code()));
  if (!deadline.is_never()) {
    const auto late = absl::FromChrono(Deadline::Clock::now() - deadline.at());
    if (late > kSlack) {
      Wrong(absl::StrCat(what, ": ended ", absl::FormatDuration(late), " after its deadline, with ",
                         status.ToString()));
    }
  }
  if (status.ok()) return;
  if (status.message().empty()) Wrong(absl::StrCat(what, ": an error that says nothing"));
  const absl::StatusCode code = status.code();
  if (terms.ending == Action::kByDeadline && code == absl::StatusCode::kDeadlineExceeded) return;
  // A handler's own nested call hears of it as a cancel.
  if (terms.ending != Action::kByItself && code == absl::StatusCode::kCancelled) return;
  if (terms.ending == Action::kByRelease && code == absl::StatusCode::kFailedPrecondition) return;
  if (refused_ && (code == absl::StatusCode::kResourceExhausted ||
                   // The other end had no thread to ask the store with, and refused a connection.
                   code == absl::StatusCode::kUnavailable)) {
    return;
  }
  // Whoever was refused by the maker of a context releases that, and tells the others who have it.
  if (refused_ &&
      (code == absl::StatusCode::kCancelled || code == absl::StatusCode::kFailedPrecondition) &&
      absl::StrContains(status.message(), "released")) {
    return;
  }
  // What waits for the store alone says when that does not answer.
  if (disturbed_ && code == absl::StatusCode::kDeadlineExceeded && deadline.is_never()) return;
  if (disturbed_ || terms.with_guests || terms.planned) {
    switch (code) {
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kNotFound:  // a function of a worker that is just there, or back
        return;
      default:
        break;
    }
  }
  if (disturbed_ || terms.planned) {
    switch (code) {
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kAborted:
      case absl::StatusCode::kFailedPrecondition:  // of a context that has failed
        return;
      default:
        break;
    }
  }
  Wrong(absl::StrCat(what, ": ", status.ToString()));
}

void Job::Act(const Action& action) {
  Note(Text(action).c_str(), static_cast<uint64_t>(action.kind));
  if (action.kind == Action::kPause) return absl::SleepFor(absl::Milliseconds(action.a));
  const std::shared_ptr<Process> process = ProcessAt(action.actor);
  if (process == nullptr) return;
  Worker* const worker = process->worker.get();
  switch (action.kind) {
    case Action::kProgram:
      return RunProgram(action, worker);
    case Action::kCall:
      return RunCall(action, worker);
    case Action::kPass:
      return RunPass(action, worker);
    case Action::kBurst:
      return RunBurst(action, worker);
    case Action::kCrowd:
      return RunCrowd(action, worker);
    case Action::kAwait:
      return RunAwait(action, worker);
    case Action::kTrain:
      return RunTrain(action, process.get());
    case Action::kPipeline:
      return RunPipeline(action, worker);
    case Action::kLook:
      return RunLook(action, worker);
    case Action::kWatch:
      return RunWatch(process.get());
    case Action::kUpdate:
      return CheckEnd(Text(action), worker->UpdateMembers(), Deadline::Never());
    default:
      return;
  }
}

// The actions of all, on one worker, for as long as it lives.
void Job::ActWithAll(int i) {
  const std::shared_ptr<Process> process = ProcessAt(i);
  if (process == nullptr) return;
  for (const Action& action : plan_.actions) {
    if (action.actor != Action::kAll) continue;
    if (ProcessAt(i) != process) return;
    Note(Text(action).c_str(), static_cast<uint64_t>(i));
    if (Draw() % 2 == 0) absl::SleepFor(absl::Microseconds(Draw() % 20000));
    if (action.kind == Action::kAverages) {
      RunAverages(action, i, process.get());
    } else {
      RunBarrier(action, i, process->worker.get());
    }
  }
}

void Job::Disturb(const Action& action) {
  Note(Text(action).c_str(), static_cast<uint64_t>(action.kind));
  const auto later = [&] {
    return SimulatedNetwork::Clock::now() + std::chrono::milliseconds(std::abs(action.c));
  };
  switch (action.kind) {
    case Action::kPause:
      return absl::SleepFor(absl::Milliseconds(action.a));
    case Action::kCut:
      disturbed_ = true;
      return network_->Cut(AddressOf(action.a), AddressOf(action.b), action.c != 0);
    case Action::kDeafen:
      disturbed_ = true;
      return network_->Deafen(AddressOf(action.a), AddressOf(action.b));
    case Action::kFailOpen:
      disturbed_ = true;
      return network_->FailConnects(AddressOf(action.a), later(), action.b != 0);
    case Action::kChoke:
      disturbed_ = true;
      return network_->Choke(AddressOf(action.a), AddressOf(action.b));
    case Action::kHold:
      disturbed_ = true;
      network_->Hold(AddressOf(action.a), AddressOf(action.b), later());
      if (action.c > 0) network_->Hold(AddressOf(action.b), AddressOf(action.a), later());
      return;
    case Action::kOutage: {
      disturbed_ = true;
      absl::MutexLock lock(&weather_->mu);
      weather_->silent_until = later();
      return;
    }
    case Action::kKill:
      KillWorker(action.a, action.b != 0);
      if (action.c >= 0) Spawn([this, action] { ComeBack(action); });
      return;
    case Action::kGuest:
      return Spawn([this, action] { RunGuest(action); });
    case Action::kClock:
      return MoveWallClock(int64_t{action.a} * 1000000);
    case Action::kRefuse:
      refused_ = true;
      return RefuseThreads(Now() + int64_t{action.c} * 1000000);
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
      const std::shared_ptr<Worker> worker = WorkerAt(i);
      if (worker == nullptr) continue;
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
        // Who watches a member that is gone goes on asking for it.
        if (bytes == 0 || (peer < plan_.workers && WorkerAt(peer) == nullptr)) continue;
        absl::StrAppend(&left, worker->name(), " has ", bytes, " bytes to ", peer, "; ");
      }
      if (metrics.passes_in_flight != 0) {
        absl::StrAppend(&left, worker->name(), " has ", metrics.passes_in_flight, " passes; ");
      }
    }
    if (left.empty()) return;
    absl::SleepFor(absl::Milliseconds(250));
  } while (!end.Passed());
  Wrong(absl::StrCat("left over: ", left, network_->Text()));
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
      if (!reply.ok()) {
        Wrong(absl::StrCat("when all is over, a call from ", from, " to ", to, ": ",
                           reply.status().ToString(), "; ", network_->Text()));
      }
    }
  }
}

// Which keys the store has at the end follows from which workers and groups there were, and not
// from how often they did something: a barrier's keys go with the next one, say.
void Job::CheckStore() {
  constexpr size_t kOfJob = 24, kOfWorker = 12, kOfGroup = 24, kOfRank = 8;
  std::set<std::string> names, groups;
  size_t of_groups = 0, of_job = 0;
  absl::MutexLock lock(&weather_->mu);
  for (const std::string& key : weather_->keys) {
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    if (parts[0] == "group") {
      groups.insert(parts.at(1));
      ++of_groups;
    } else {
      if (parts[0] == "name") names.insert(key);
      ++of_job;
    }
  }
  const size_t workers = std::max<size_t>(names.size(), plan_.workers);
  if (of_job <= kOfJob + kOfWorker * workers &&
      of_groups <= groups.size() * (kOfGroup + kOfRank * plan_.workers)) {
    return;
  }
  Wrong(absl::StrCat("the store has ", of_job, " keys of a job of ", workers, " workers, and ",
                     of_groups, " of ", groups.size(),
                     " groups: ", absl::StrJoin(weather_->keys, ", ")));
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
  RefuseThreads(0);
  Note("acted", 0);
  // Those who took each other for lost find that they are not.
  if (disturbed_) absl::SleepFor(kLongestHold + 3 * kHeartbeatLimit);
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
      if (process == nullptr || killed_) return;
      const absl::Status ended = process->worker->Shutdown(Deadline::After(absl::Minutes(1)));
      if (!ended.ok()) Wrong(absl::StrCat("the end of ", i, ": ", ended.ToString()));
    });
  }
  JoinSpawned();
  CheckStore();
  if (network_->ends() != 0) Wrong(absl::StrCat(network_->ends(), " ends of connections are left"));
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
