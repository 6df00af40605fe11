// Calls, passes over random paths, and the programs of property_test.
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/autograd/state.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/scheduler.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {
namespace {

// A bit of the bytes of a path: the worker before makes a call that it does not wait for.
constexpr uint8_t kCallsAside = 0x80;

}  // namespace

void Job::RegisterCalls(Worker* worker, int i) {
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
    Spawn([promise, message = r.message]() mutable {
      absl::SleepFor(absl::Milliseconds(10));
      promise->Set(std::move(message));
    });
    return answer;
  }));
  // Goes on along a path of workers, one for each byte.
  add("chain", [this, worker, i](Request& r) -> absl::StatusOr<Message> {
    const at::Tensor y = Forward(r.message.tensors.at(0), parameters_[i][0]);
    if (r.message.payload.empty()) return Message{"", {y}};
    const auto next = static_cast<uint8_t>(r.message.payload[0]);
    if ((next & kCallsAside) != 0) {
      // Nobody waits for it, no root depends on it, and it takes longer than all else: the pass may
      // begin before it has arrived.
      const int other = AsideOf(i, next & ~kCallsAside, plan_.workers);
      const Message message{"", {y.repeat({8, 1})}};
      Spawn([aside = worker->CallAsync(NameOf(other), "slow", message, r.Nested())] {
        aside.Wait().status().IgnoreError();  // of a pass that is over it says that
      });
    }
    return worker->Call(NameOf(next & ~kCallsAside), "chain", {r.message.payload.substr(1), {y}},
                        r.Nested());
  });
  add("gradient", [this, i](Request& r) -> absl::StatusOr<Message> {
    absl::StatusOr<at::Tensor> gradient = r.context.Gradient(parameters_[i][0]);
    if (!gradient.ok()) return gradient.status();
    return Message{"", {*gradient}};
  });
}

void Job::RunCall(const Action& action, Process* process) {
  Worker* const worker = process->worker.get();
  static const char* const kNames[] = {"echo",  "slow",   "nested", "later",
                                       "waits", "throws", "until"};
  const std::string what = absl::StrCat(Text(action), " (", kNames[action.b], ")");
  Doing doing{what, process, {action.actor, action.a}};
  if (action.b == Action::kNested) doing.workers.insert((action.a + 1) % plan_.workers);
  const at::Tensor x = Constant(action.a + 1);
  CallOptions options;
  Deadline deadline = Deadline::After(kTimeout);
  if (action.c == Action::kByDeadline) {
    // Some have passed when the call has hardly begun.
    deadline = Deadline::After(absl::Microseconds(Draw() % (Draw() % 2 == 0 ? 100 : 40000)));
  }
  options.deadline = deadline;
  Future<Message> reply =
      worker->CallAsync(NameOf(action.a), kNames[action.b], {what, {x}}, options);
  if (action.c == Action::kByCancel) {
    absl::SleepFor(absl::Microseconds(Draw() % 40000));
    reply.Cancel();
  }
  absl::StatusOr<Message> message = reply.Take();
  if (action.b == Action::kThrows) {
    if (message.ok()) return Wrong(absl::StrCat(what, ": OK, though it throws"));
    if (absl::StrContains(message.status().message(), "on fire")) return;
  }
  CheckEnd(doing, message.status(), deadline, action.c);
  if (!message.ok()) return;
  if (message->payload != what || message->tensors.size() != 1 ||
      !at::allclose(message->tensors[0], x)) {
    Wrong(absl::StrCat(what, ": another reply"));
  }
}

void Job::RunPass(const Action& action, Process* process) {
  Worker* const worker = process->worker.get();
  std::mt19937_64 random(action.a);
  const std::string what = Text(action);
  std::string path = DrawPath(random, plan_.workers);
  const bool visits = (action.c & Action::kVisit) != 0 && plan_.guests > 0;
  if (visits) {
    path[random() % path.size()] = static_cast<char>(plan_.workers + random() % plan_.guests);
  }
  const bool is_large = (action.c & Action::kLarge) != 0 && action.a % 4 == 0;
  const int64_t rows = is_large ? 1 + static_cast<int64_t>(kLargePacket / (2 * sizeof(double))) : 2;
  const at::Tensor x = at::full({rows, 2}, 0.5, at::kDouble).set_requires_grad(true);
  Doing doing{what, process, {action.actor}};
  doing.workers.insert(path.begin(), path.end());
  // What the workers are told of the path behind the first.
  std::string rest = path.substr(1);
  if (is_large && (action.c & Action::kAside) != 0 && !rest.empty()) {
    doing.workers.insert(AsideOf(path[0], rest[0], plan_.workers));
    rest[0] = static_cast<char>(static_cast<uint8_t>(rest[0]) | kCallsAside);
  }
  const Deadline forward_deadline = Deadline::After(kTimeout);
  Context context = worker->NewContext();
  const CallOptions options{.context = &context, .deadline = forward_deadline};
  std::vector<Future<Message>> beside;
  if ((action.c & Action::kSideCall) != 0) {
    // Of the same context, with an answer that no root depends on.
    beside.push_back(worker->CallAsync(NameOf(path[0]), "slow", {"", {x}}, options));
  }
  const at::Tensor sent = at::mul(x, 1.0);
  Future<Message> forward = worker->CallAsync(NameOf(path[0]), "chain", {rest, {sent}}, options);
  // After the call, however late that leaves; large tensors are sent from where they are.
  if ((action.c & Action::kWrite) != 0 && !is_large) sent.mul_(3.0);
  const absl::StatusOr<Message> reply = forward.Take();
  CheckEnd(doing.Part("its call"), reply.status(), forward_deadline);
  const bool gives_up = (action.c & Action::kCancelSide) != 0;
  if (gives_up) {
    for (Future<Message>& future : beside) future.Cancel();
  }
  if (reply.ok()) {
    Deadline deadline = Deadline::After(kTimeout);
    if (action.b == Action::kByDeadline) {
      deadline = Deadline::After(absl::Milliseconds(Draw() % 10));
    }
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
    CheckEnd(doing.Part("its pass"), done, deadline, action.b);
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
        CheckEnd(doing.Part("the gradient of " + of), got.status(), Deadline::Never());
        if (got.ok() && !at::allclose(*got, at::mul(want[i], passes))) {
          Wrong(absl::StrCat(what, ": the gradient of ", of, " is not that of one process"));
        }
      };
      check(context.Gradient(x), 0, "x");
      size_t i = 1;
      for (const auto& [w, leaf] : leaves) {
        const Deadline until = Deadline::After(kTimeout);
        absl::StatusOr<Message> gradient =
            worker->Call(NameOf(w), "gradient", {}, {.context = &context, .deadline = until});
        // Who was not connected with a guest that leaves does not reach it any more.
        CheckEnd(doing.Part("asking for a gradient"), gradient.status(), until);
        if (gradient.ok()) check(gradient->tensors.at(0), i, NameOf(w));
        ++i;
      }
    }
  }
  for (Future<Message>& future : beside) {
    const bool is_alone = action.b == Action::kByItself && !gives_up;
    CheckEnd(doing.Part("the call beside"), future.Wait().status(), forward_deadline,
             is_alone ? action.b : int{Action::kByRelease});
  }
}

// Deadlines that pass when a call has hardly begun, and while its timer is being set.
void Job::RunBurst(const Action& action, Process* process) {
  Worker* const worker = process->worker.get();
  const Doing doing{Text(action), process, {action.actor, action.a}};
  std::vector<std::pair<Future<Message>, Deadline>> calls;
  for (int i = 0; i < action.c; ++i) {
    const Deadline deadline =
        Deadline::After(absl::Microseconds(Draw() % 2 == 0 ? Draw() % 100 : Draw() % 3000));
    const CallOptions options{.deadline = deadline};
    if (action.b != 0) {
      calls.emplace_back(worker->CallAsync(NameOf(action.a), "until", {}, options), deadline);
      continue;
    }
    const absl::StatusOr<Message> reply = worker->Call(NameOf(action.a), "until", {}, options);
    CheckEnd(doing.Part(absl::StrCat("call ", i)), reply.status(), deadline, Action::kByDeadline);
  }
  for (auto& [call, deadline] : calls) {
    CheckEnd(doing, call.Take().status(), deadline, Action::kByDeadline);
  }
}

// Passes, and threads that ask what they wait for.
void Job::RunLook(const Action& action, Process* process) {
  constexpr int kPasses = 4;
  std::vector<std::thread> threads;
  const MustStart must_start;
  for (int i = 0; i < action.b; ++i) {
    threads.emplace_back([&] {
      for (int look = 0; look < action.c; ++look) {
        (void)process->worker->Contexts();
        absl::SleepFor(absl::Microseconds(Draw() % 300));
      }
    });
  }
  for (int i = 0; i < kPasses; ++i) {
    RunPass({Action::kPass, action.actor, action.a + i, Action::kByItself, 0}, process);
  }
  for (std::thread& thread : threads) thread.join();
}

// What several threads send over one connection, in which each call's cancel comes behind the call.
void Job::RunCrowd(const Action& action, Process* process) {
  const Doing doing{Text(action), process, {action.actor, action.a}};
  std::vector<std::thread> threads;
  const MustStart must_start;
  for (int i = 0; i < action.b; ++i) {
    threads.emplace_back([&] {
      std::vector<Future<Message>> calls;
      const Deadline deadline = Deadline::After(kTimeout);
      for (int call = 0; call < action.c; ++call) {
        calls.push_back(
            process->worker->CallAsync(NameOf(action.a), "until", {}, {.deadline = deadline}));
        calls.back().Cancel();
      }
      for (Future<Message>& call : calls) {
        CheckEnd(doing, call.Take().status(), deadline, Action::kByCancel);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Waits for an answer that does not come for as long as it wants to, whatever the wall clock says.
void Job::RunAwait(const Action& action, Process* process) {
  const Doing doing{Text(action), process, {action.actor, action.a}};
  const Deadline of_call = Deadline::After(kTimeout);
  Future<Message> reply =
      process->worker->CallAsync(NameOf(action.a), "until", {}, {.deadline = of_call});
  const Deadline deadline = Deadline::After(absl::Milliseconds(action.c));
  const bool done = reply.WaitUntil(deadline);
  CheckEnd(doing.Part("waiting"), absl::OkStatus(), deadline);
  if (!done && !deadline.Passed()) Wrong(doing.what + ": it has given up before its deadline");
  reply.Cancel();
  CheckEnd(doing, reply.Take().status(), of_call, Action::kByCancel);
}

void Job::RunProgram(const Action& action, Process* process) {
  Worker* const worker = process->worker.get();
  Doing doing{Text(action), process, {}};
  for (int i = 0; i < kWorkers; ++i) doing.workers.insert(i);
  auto owned = std::make_unique<std::pair<Steps, State>>();
  auto* const run = owned.get();
  run->first = RandomProgram(action.a, kAllFeatures);
  State local;
  local.parameters = run->second.parameters = parameters_;
  {
    absl::MutexLock lock(&mu_);
    runs_.push_back(std::move(owned));
  }
  LocalFrame(&local, action.actor).Run(run->first, {}, {});
  std::shared_ptr<Process> newcomer;
  if (CallsNewcomer(run->first)) {
    {
      absl::MutexLock lock(&mu_);
      run->second.newcomer = absl::StrCat("newcomer", ++newcomers_);
    }
    const size_t absence = BeginAbsence(run->second.newcomer);
    auto joined = NewProcess(kNewcomer, run->second.newcomer, /*joins=*/true);
    CheckEnd(doing.Part("a newcomer"), joined.status(), Deadline::Never());
    if (!joined.ok()) return;
    EndAbsence(absence);
    newcomer = *std::move(joined);
  }
  // For all of its calls and passes together.
  const Deadline deadline = Deadline::After(4 * kTimeout), end = Deadline::After(5 * kTimeout);
  {
    const Context context = worker->NewContext();
    DistributedFrame(&run->second, action.actor, worker,
                     {.context = &context, .deadline = deadline})
        .Run(run->first, {}, {});
    for (int w = 0; w <= kNewcomer; ++w) {
      if (w == kNewcomer && newcomer == nullptr) continue;
      const absl::Status taken = DistributedFrame::TakeGradients(
          *worker, w == kNewcomer ? run->second.newcomer : WorkerName(w), context, &run->second);
      if (!taken.ok()) run->second.Fail(taken);
    }
  }
  absl::Status status, late;
  {
    absl::MutexLock lock(&run->second.mu);
    status = run->second.status;
    late = run->second.late;
  }
  CheckEnd(doing, status, end, Terms{.anywhere = true});
  // After the first error the program goes on, in contexts that have lost something.
  CheckEnd(doing.Part("what ended by its deadline"), late, end, Terms{.anywhere = true});
  if (newcomer != nullptr) EndGuest(Text(action), kNewcomer, newcomer.get());
  if (!status.ok()) return;
  const std::string difference = Difference(run->first, local, run->second);
  if (!difference.empty()) Wrong(absl::StrCat(Text(action), ": ", difference));
}

}  // namespace distgrad::simulation
