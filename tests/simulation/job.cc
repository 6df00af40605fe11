// Runs a plan, and checks what came of it.
#include "tests/simulation/job.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/base/internal/sysinfo.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/autograd/state.h"
#include "core/base/check.h"
#include "core/membership/store/in_process_store.h"
#include "core/worker/metrics.h"
#include "core/worker/worker.h"
#include "tests/integration/property_frame.h"
#include "tests/simulation/network.h"
#include "tests/simulation/store.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {
namespace {

// Longer than anything that is disturbed takes to be noticed.
constexpr absl::Duration kTimeout = absl::Minutes(1);
constexpr absl::Duration kHeartbeatLimit = absl::Seconds(4);
// What ends by a deadline ends soon after it, however slow the threads are.
constexpr absl::Duration kSlack = absl::Seconds(5);

void Must(const absl::Status& status) { DG_CHECK(status.ok()) << status; }

constexpr absl::Duration kLongestHold = absl::Seconds(8);

at::Tensor Constant(double value) { return at::full({2, 2}, value, at::kDouble); }

// What a worker does to a value on its way.
at::Tensor Forward(const at::Tensor& x, const at::Tensor& parameter) {
  return at::add(at::tanh(at::mm(x, parameter)), x);
}

// A process, as far as there is one.
struct Process {
  std::shared_ptr<SimulatedHost> host;
  std::shared_ptr<SimulatedStore> store;
  std::shared_ptr<Worker> worker;
};

class Job {
 public:
  explicit Job(const Plan& plan)
      : plan_(plan),
        network_(std::make_shared<SimulatedNetwork>(plan.seed + 1, NetworkOf(plan))),
        weather_(std::make_shared<StoreWeather>(plan.seed + 2)),
        store_(NewInProcessStore()),
        processes_(plan.workers) {
    for (int w = 0; w <= kWorkers; ++w) {
      parameters_.emplace_back();
      for (int i = 0; i < kParameters; ++i) {
        parameters_.back().push_back(Constant(0.1 * (w + 1) + 0.03 * i).set_requires_grad(true));
      }
    }
  }

  std::string Run();

 private:
  static NetworkOptions NetworkOf(const Plan& plan) {
    NetworkOptions options;
    if ((plan.faults & kSlowPackets) != 0) options.slow_one_in = 8;
    return options;
  }

  void Wrong(const std::string& what) {
    Note("wrong", 1);
    absl::MutexLock lock(&mu_);
    if (wrong_.empty()) wrong_ = what;
  }
  std::string wrong() {
    absl::MutexLock lock(&mu_);
    return wrong_;
  }
  // Whether something may have failed that must not fail otherwise.
  bool disturbed() const { return disturbed_; }

  std::shared_ptr<Worker> WorkerAt(int i) {
    absl::MutexLock lock(&mu_);
    return processes_[i] == nullptr ? nullptr : processes_[i]->worker;
  }
  std::string AddressOf(int i) {
    absl::MutexLock lock(&mu_);
    return processes_[i] == nullptr ? "" : processes_[i]->host->address();
  }

  absl::Status StartWorker(int i);
  void RegisterAll(Worker* worker, int i);
  void KillWorker(int i, bool silently);

  void Act(const Action& action);
  void Disturb(const Action& action);
  void RunProgram(const Action& action, Worker* worker);
  void RunCall(const Action& action, Worker* worker);
  void RunPass(const Action& action, Worker* worker);

  // Checks how something ended that was to be over by then.
  void CheckEnd(const std::string& what, const absl::Status& status, int ending,
                absl::Time deadline);
  void CheckNothingIsLeft();
  // Those who live reach each other again.
  void CheckAllIsWell();

  const Plan& plan_;
  const std::shared_ptr<SimulatedNetwork> network_;
  const std::shared_ptr<StoreWeather> weather_;
  const std::shared_ptr<Store> store_;
  std::vector<Tensors> parameters_;  // by worker
  std::atomic<bool> disturbed_{false}, killed_{false};

  absl::Mutex mu_;
  std::vector<std::shared_ptr<Process>> processes_ ABSL_GUARDED_BY(mu_);  // null: dead
  std::set<int> coming_back_ ABSL_GUARDED_BY(mu_);
  std::string wrong_ ABSL_GUARDED_BY(mu_);
  // Of programs, to the end: a call may outlive its deadline.
  std::vector<std::unique_ptr<std::pair<Steps, State>>> runs_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> others_ ABSL_GUARDED_BY(mu_);  // that answer later, or come back
};

absl::Status Job::StartWorker(int i) {
  auto process = std::make_shared<Process>();
  process->host = std::make_shared<SimulatedHost>(network_);
  process->store = std::make_shared<SimulatedStore>(store_, weather_);
  WorkerOptions options{.name = WorkerName(i),
                        .store = process->store,
                        .rank = i,
                        .world_size = plan_.workers,
                        .transport = "inproc",
                        .network = process->host,
                        .threads = static_cast<size_t>(plan_.threads),
                        .timeout = kTimeout,
                        .heartbeat_limit = kHeartbeatLimit};
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Create(std::move(options));
  if (!worker.ok()) return worker.status();
  process->worker = *std::move(worker);
  RegisterAll(process->worker.get(), i);
  absl::MutexLock lock(&mu_);
  processes_[i] = std::move(process);
  return absl::OkStatus();
}

void Job::RegisterAll(Worker* worker, int i) {
  const auto add = [&](const char* name, Worker::Handler handler) {
    Must(worker->Register(name, std::move(handler)));
  };
  add("echo", [](Request& r) -> absl::StatusOr<Message> { return r.message; });
  add("slow", [](Request& r) -> absl::StatusOr<Message> {
    absl::SleepFor(absl::Milliseconds(30));
    return r.message;
  });
  add("until", [](Request& r) -> absl::StatusOr<Message> {
    while (!r.cancellation->cancelled()) absl::SleepFor(absl::Milliseconds(20));
    return r.message;
  });
  add("throws", [](Request&) -> absl::StatusOr<Message> { throw std::runtime_error("on fire"); });
  add("nested", [this, worker, i](Request& r) -> absl::StatusOr<Message> {
    return worker->Call(WorkerName((i + 1) % plan_.workers), "echo", r.message, r.Nested());
  });
  // Comes back to its caller, and so needs a thread of a pool that may wait for this one.
  add("waits", [worker](Request& r) -> absl::StatusOr<Message> {
    return worker->CallAsync(r.from, "slow", r.message, r.Nested()).Take();
  });
  Must(worker->RegisterAsync("later", [this](Request& r) {
    auto promise = std::make_shared<Promise<Message>>();
    Future<Message> answer = promise->future();
    std::thread other([promise, message = r.message]() mutable {
      absl::SleepFor(absl::Milliseconds(10));
      promise->Set(std::move(message));
    });
    absl::MutexLock lock(&mu_);
    others_.push_back(std::move(other));
    return answer;
  }));
  // Goes on along a path of workers, one for each byte.
  add("chain", [this, worker, i](Request& r) -> absl::StatusOr<Message> {
    const at::Tensor y = Forward(r.message.tensors.at(0), parameters_[i][0]);
    if (r.message.payload.empty()) return Message{"", {y}};
    return worker->Call(WorkerName(r.message.payload[0]), "chain",
                        {r.message.payload.substr(1), {y}}, r.Nested());
  });
  add("gradient", [this, i](Request& r) -> absl::StatusOr<Message> {
    absl::StatusOr<at::Tensor> gradient = r.context.Gradient(parameters_[i][0]);
    if (!gradient.ok()) return gradient.status();
    return Message{"", {*gradient}};
  });
  if (i < kWorkers) Must(DistributedFrame::Register(*worker, i));
}

void Job::KillWorker(int i, bool silently) {
  std::shared_ptr<Process> process;
  {
    absl::MutexLock lock(&mu_);
    process.swap(processes_[i]);
  }
  if (process == nullptr) return;
  disturbed_ = killed_ = true;
  Note("kill", i);
  network_->Kill(process->host->address(), silently);
  process->store->Kill();
  // What is left of it here says nothing to anybody any more.
  process->worker->Close();
}

void Job::CheckEnd(const std::string& what, const absl::Status& status, int ending,
                   absl::Time deadline) {
  Note("ended", static_cast<uint64_t>(status.code()));
  if (absl::Now() > deadline + kSlack) {
    Wrong(absl::StrCat(what, ": ended ", absl::FormatDuration(absl::Now() - deadline),
                       " after its deadline, with ", status.ToString()));
  }
  if (status.ok()) return;
  if (status.message().empty()) Wrong(absl::StrCat(what, ": an error that says nothing"));
  const absl::StatusCode code = status.code();
  if (ending == Action::kByDeadline && code == absl::StatusCode::kDeadlineExceeded) return;
  // A handler's own nested call hears of it as a cancel.
  if (ending != Action::kByItself && code == absl::StatusCode::kCancelled) return;
  if (ending == Action::kByRelease && code == absl::StatusCode::kFailedPrecondition) return;
  // What waits for the store alone says when that does not answer.
  if (disturbed_ && code == absl::StatusCode::kDeadlineExceeded &&
      deadline == absl::InfiniteFuture()) {
    return;
  }
  if (disturbed_) {
    switch (code) {
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kAborted:
      case absl::StatusCode::kFailedPrecondition:  // of a context that has failed
      case absl::StatusCode::kNotFound:            // a function of a worker that is just back
        return;
      default:
        break;
    }
  }
  Wrong(absl::StrCat(what, ": ", status.ToString()));
}

void Job::RunCall(const Action& action, Worker* worker) {
  static const char* const kNames[] = {"echo",  "slow",   "nested", "later",
                                       "waits", "throws", "until"};
  const std::string what = absl::StrCat(Text(action), " (", kNames[action.b], ")");
  const at::Tensor x = Constant(action.a + 1);
  CallOptions options;
  absl::Time deadline = absl::Now() + kTimeout;
  if (action.c == Action::kByDeadline) {
    // Some have passed when the call has hardly begun.
    deadline = absl::Now() + absl::Microseconds(Draw() % (Draw() % 2 == 0 ? 100 : 40000));
  }
  options.deadline = deadline;
  Future<Message> reply =
      worker->CallAsync(WorkerName(action.a), kNames[action.b], {what, {x}}, options);
  if (action.c == Action::kByCancel) {
    absl::SleepFor(absl::Microseconds(Draw() % 40000));
    reply.Cancel();
  }
  absl::StatusOr<Message> message = reply.Take();
  if (action.b == Action::kThrows) {
    if (message.ok()) return Wrong(absl::StrCat(what, ": OK, though it throws"));
    if (absl::StrContains(message.status().message(), "on fire")) return;
  }
  CheckEnd(what, message.status(), action.c, deadline);
  if (!message.ok()) return;
  if (message->payload != what || message->tensors.size() != 1 ||
      !at::allclose(message->tensors[0], x)) {
    Wrong(absl::StrCat(what, ": another reply"));
  }
}

void Job::RunPass(const Action& action, Worker* worker) {
  std::mt19937_64 random(action.a);
  const std::string what = Text(action);
  std::string path;
  for (int i = 1 + static_cast<int>(random() % 4); i > 0; --i) {
    path.push_back(static_cast<char>(random() % plan_.workers));
  }
  const at::Tensor x = Constant(0.5).set_requires_grad(true);
  const absl::Time forward_deadline = absl::Now() + kTimeout;
  Context context = worker->NewContext();
  const CallOptions options{.context = &context, .deadline = forward_deadline};
  std::vector<Future<Message>> beside;
  if ((action.c & Action::kSideCall) != 0) {
    // Of the same context, with an answer that no root depends on.
    beside.push_back(worker->CallAsync(WorkerName(path[0]), "slow", {"", {x}}, options));
  }
  const absl::StatusOr<Message> reply =
      worker->Call(WorkerName(path[0]), "chain", {path.substr(1), {x}}, options);
  CheckEnd(what + ", its call", reply.status(), Action::kByItself, forward_deadline);
  const bool gives_up = (action.c & Action::kCancelSide) != 0;
  if (gives_up) {
    for (Future<Message>& future : beside) future.Cancel();
  }
  if (reply.ok()) {
    absl::Time deadline = absl::Now() + kTimeout;
    if (action.b == Action::kByDeadline) deadline = absl::Now() + absl::Milliseconds(Draw() % 10);
    const int passes = (action.c & Action::kTwice) != 0 ? 2 : 1;
    absl::Status done;
    for (int pass = 1; pass <= passes && done.ok(); ++pass) {
      const BackwardOptions how{.retain_graph = pass < passes, .deadline = deadline};
      const at::Tensor root = reply->tensors[0].sum();
      if ((action.c & Action::kAsync) == 0 && action.b == Action::kByItself) {
        done = context.Backward({root}, how);
        continue;
      }
      const Future<Unit> backward = context.BackwardAsync({root}, how);
      if (action.b == Action::kByCancel || action.b == Action::kByRelease) {
        absl::SleepFor(absl::Microseconds(Draw() % 5000));
        if (action.b == Action::kByCancel) {
          backward.Cancel();
        } else {
          context.Release();
        }
      }
      done = backward.Wait().status();
    }
    CheckEnd(what + ", its pass", done, action.b, deadline);
    if (done.ok() && action.b != Action::kByRelease) {
      // The same here, by libtorch alone.
      at::Tensor y = x;
      std::map<int, at::Tensor> leaves;
      for (const char w : path) {
        leaves[w] = parameters_[w][0];
        y = Forward(y, leaves[w]);
      }
      Tensors inputs = {x};
      for (const auto& [w, leaf] : leaves) inputs.push_back(leaf);
      const Tensors want = torch::autograd::grad({y.sum()}, inputs);
      const auto check = [&](const absl::StatusOr<at::Tensor>& got, size_t i,
                             const std::string& of) {
        CheckEnd(absl::StrCat(what, ", the gradient of ", of), got.status(), Action::kByItself,
                 absl::InfiniteFuture());
        if (got.ok() && !at::allclose(*got, at::mul(want[i], passes))) {
          Wrong(absl::StrCat(what, ": the gradient of ", of, " is not that of one process"));
        }
      };
      check(context.Gradient(x), 0, "x");
      size_t i = 1;
      for (const auto& [w, leaf] : leaves) {
        const absl::Time until = absl::Now() + kTimeout;
        absl::StatusOr<Message> gradient =
            worker->Call(WorkerName(w), "gradient", {}, {.context = &context, .deadline = until});
        CheckEnd(what + ", asking for a gradient", gradient.status(), Action::kByItself, until);
        if (gradient.ok()) check(gradient->tensors.at(0), i, WorkerName(w));
        ++i;
      }
    }
  }
  for (Future<Message>& future : beside) {
    CheckEnd(what + ", the call beside", future.Wait().status(),
             action.b == Action::kByItself && !gives_up ? action.b : int{Action::kByRelease},
             forward_deadline);
  }
}

void Job::RunProgram(const Action& action, Worker* worker) {
  auto owned = std::make_unique<std::pair<Steps, State>>();
  auto* const run = owned.get();
  run->first = RandomProgram(action.a, kAllFeatures & ~kNewcomers);
  State local;
  local.parameters = run->second.parameters = parameters_;
  {
    absl::MutexLock lock(&mu_);
    runs_.push_back(std::move(owned));
  }
  LocalFrame(&local, action.actor).Run(run->first, {}, {});
  // For all of its calls and passes together.
  const absl::Time deadline = absl::Now() + 4 * kTimeout;
  {
    const Context context = worker->NewContext();
    DistributedFrame(&run->second, action.actor, worker,
                     {.context = &context, .deadline = deadline})
        .Run(run->first, {}, {});
    for (int w = 0; w < kWorkers; ++w) {
      const absl::Status taken =
          DistributedFrame::TakeGradients(*worker, WorkerName(w), context, &run->second);
      if (!taken.ok()) run->second.Fail(taken);
    }
  }
  absl::Status status;
  {
    absl::MutexLock lock(&run->second.mu);
    status = run->second.status;
  }
  CheckEnd(Text(action), status, Action::kByItself, deadline + kTimeout);
  if (!status.ok()) return;
  const std::string difference = Difference(local, run->second);
  if (!difference.empty()) Wrong(absl::StrCat(Text(action), ": ", difference));
}

void Job::Act(const Action& action) {
  Note(Text(action).c_str(), static_cast<uint64_t>(action.kind));
  if (action.kind == Action::kPause) return absl::SleepFor(absl::Milliseconds(action.a));
  const std::shared_ptr<Worker> worker = WorkerAt(action.actor);
  if (worker == nullptr) return;
  switch (action.kind) {
    case Action::kProgram:
      return RunProgram(action, worker.get());
    case Action::kCall:
      return RunCall(action, worker.get());
    case Action::kPass:
      return RunPass(action, worker.get());
    case Action::kUpdate:
      return CheckEnd(Text(action), worker->UpdateMembers(), Action::kByItself,
                      absl::InfiniteFuture());
    default:
      return;
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
    case Action::kKill: {
      KillWorker(action.a, action.b != 0);
      if (action.c < 0) return;
      std::thread back([this, action] {
        absl::SleepFor(absl::Milliseconds(action.c));
        {
          absl::MutexLock lock(&mu_);
          if (processes_[action.a] != nullptr || !coming_back_.insert(action.a).second) return;
        }
        const absl::Status started = StartWorker(action.a);
        {
          absl::MutexLock lock(&mu_);
          coming_back_.erase(action.a);
        }
        CheckEnd(absl::StrCat(Text(action), ", coming back"), started, Action::kByItself,
                 absl::InfiniteFuture());
      });
      absl::MutexLock lock(&mu_);
      others_.push_back(std::move(back));
      return;
    }
    default:
      return;
  }
}

void Job::CheckNothingIsLeft() {
  // All that anybody waits for has a deadline, or a heartbeat.
  const absl::Time end = absl::Now() + kTimeout + 3 * kHeartbeatLimit + absl::Seconds(20);
  std::string left;
  do {
    left.clear();
    for (int i = 0; i < plan_.workers; ++i) {
      const std::shared_ptr<Worker> worker = WorkerAt(i);
      if (worker == nullptr) continue;
      for (const ContextState& context : worker->Contexts()) {
        absl::StrAppend(&left, worker->name(), " has a context with ", context.sends, " sends, ",
                        context.recvs, " recvs and ", context.passes.size(), " passes; ");
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
      if (metrics.passes_running != 0) {
        absl::StrAppend(&left, worker->name(), " has ", metrics.passes_running, " passes; ");
      }
    }
    if (left.empty()) return;
    absl::SleepFor(absl::Milliseconds(250));
  } while (absl::Now() < end);
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
                             {.deadline = absl::Now() + absl::Seconds(10)});
        if (reply.ok()) break;
      }
      if (!reply.ok()) {
        Wrong(absl::StrCat("when all is over, a call from ", from, " to ", to, ": ",
                           reply.status().ToString(), "; ", network_->Text()));
      }
    }
  }
}

std::string Job::Run() {
  {
    std::vector<std::thread> starting;
    for (int i = 0; i < plan_.workers; ++i) {
      starting.emplace_back([this, i] {
        const absl::Status started = StartWorker(i);
        if (!started.ok()) Wrong(absl::StrCat("start of ", i, ": ", started.ToString()));
      });
    }
    for (std::thread& thread : starting) thread.join();
  }
  if (!wrong().empty()) return wrong();
  Note("started", plan_.workers);
  // All have registered their functions by now.
  std::vector<std::thread> actors;
  for (int actor = -1; actor < plan_.workers; ++actor) {
    actors.emplace_back([this, actor] {
      for (const Action& action : plan_.actions) {
        if (action.actor != actor) continue;
        if (actor < 0) {
          Disturb(action);
        } else {
          Act(action);
        }
      }
    });
  }
  for (std::thread& thread : actors) thread.join();
  Calm();
  Note("acted", 0);
  while (true) {
    std::vector<std::thread> others;
    {
      absl::MutexLock lock(&mu_);
      others.swap(others_);
    }
    if (others.empty()) break;
    for (std::thread& thread : others) thread.join();
  }
  // Those who took each other for lost find that they are not.
  if (disturbed_) absl::SleepFor(kLongestHold + 3 * kHeartbeatLimit);
  CheckNothingIsLeft();
  Note("quiet", 0);
  CheckAllIsWell();
  {
    std::vector<std::thread> ending;
    for (int i = 0; i < plan_.workers; ++i) {
      ending.emplace_back([this, i] {
        std::shared_ptr<Process> process;
        {
          absl::MutexLock lock(&mu_);
          process.swap(processes_[i]);
        }
        if (process == nullptr) return;
        if (!killed_) {
          const absl::Status ended = process->worker->Shutdown(absl::Now() + absl::Minutes(1));
          if (!ended.ok()) Wrong(absl::StrCat("the end of ", i, ": ", ended.ToString()));
        }
        process->worker.reset();
      });
    }
    for (std::thread& thread : ending) thread.join();
  }
  while (true) {
    std::vector<std::thread> others;
    {
      absl::MutexLock lock(&mu_);
      others.swap(others_);
    }
    if (others.empty()) break;
    for (std::thread& thread : others) thread.join();
  }
  if (network_->ends() != 0) Wrong(absl::StrCat(network_->ends(), " ends of connections are left"));
  return wrong();
}

}  // namespace

std::string RunJob(absl::string_view order, Course* course) {
  const Plan plan = PlanOf(order);
  Schedule schedule{.seed = plan.seed, .trace = plan.trace};
  if ((plan.faults & kPreemption) != 0) {
    schedule.preempt_one_in = 1 << (2 + plan.seed % 6);
    schedule.spurious_one_in = 50;
  }
  if ((plan.faults & kStalls) != 0) {
    schedule.stall_one_in = 200;
    schedule.longest_stall = 20000000;
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
