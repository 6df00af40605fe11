// The kinds of work, and the threads that do them.
#include "tests/soak/load.h"

#include <ATen/ATen.h>
#include <sys/socket.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/cancellation.h"
#include "core/base/check.h"
#include "core/base/status.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/parallel/process_group/process_group.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

constexpr int kMixThreads = 3;
constexpr absl::Duration kMixGap = absl::Milliseconds(50), kPingGap = absl::Milliseconds(10),
                         kTrainingGap = absl::Milliseconds(50), kPairGap = absl::Milliseconds(200);
constexpr int kPairRounds = 50;  // of one process group
constexpr int kBlocked = 24;     // more than a pool keeps

constexpr char kFill[] = "calls that block", kPing[] = "ping", kTrainingStep[] = "training step",
               kProcessGroup[] = "process group";

absl::Status Wrong(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("a wrong result: ", what));
}

// The status that a call must end with.
absl::Status ExpectCode(absl::StatusCode code, const absl::Status& status) {
  if (status.code() == code) return absl::OkStatus();
  if (!status.ok()) return status;
  return Wrong(absl::StrCat("it ended well, and not with ", absl::StatusCodeToString(code)));
}

template <typename Number>
Number Pick(Load::Random& random, Number least, Number most) {
  return std::uniform_int_distribution<Number>(least, most)(random);
}

absl::Duration UpTo(Load::Random& random, absl::Duration most) {
  return absl::Microseconds(Pick<int64_t>(random, 0, absl::ToInt64Microseconds(most)));
}

// A thread that sends back each byte. For one thread.
class Pipe {
 public:
  Pipe() {
    DG_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends_) == 0);
    thread_ = std::thread([fd = ends_[1]] {
      for (char byte; read(fd, &byte, 1) == 1;) DG_CHECK(write(fd, &byte, 1) == 1);
    });
  }
  ~Pipe() {
    shutdown(ends_[0], SHUT_RDWR);
    thread_.join();
    for (const int fd : ends_) close(fd);
  }
  void SendAndReceive() {
    char byte = 1;
    DG_CHECK(write(ends_[0], &byte, 1) == 1 && read(ends_[0], &byte, 1) == 1);
  }

 private:
  int ends_[2];
  std::thread thread_;
};

}  // namespace

const std::vector<Load::Kind> Load::kKinds = {
    {"small call", 30, &Load::Small},
    {"large call", 3, &Load::Large},
    {"call of all", 5, &Load::Many},
    {"operator", 5, &Load::Operator},
    {"nested call", 10, &Load::Nested},
    {"deadline that expires", 10, &Load::Expires},
    {"deadline of microseconds", 10, &Load::ExpiresSoon},
    {"cancelled call", 10, &Load::Cancelled},
    {"handler that fails", 5, &Load::Fails},
    {"unknown function", 2, &Load::Unknown},
    {"pass", 15, &Load::Pass},
    {"pass given up", 10, &Load::PassGivenUp},
};

Load::Load(Worker* worker, const Optimizers* optimizers, uint64_t seed, Fail fail)
    : worker_(worker),
      optimizers_(optimizers),
      seed_(seed),
      fail_(std::move(fail)),
      other_(worker->name() == kFront ? kMiddle : kFront),
      leads_(!IsTransient(worker->name())) {
  for (int i = 0; i < kMixThreads; ++i) threads_.emplace_back([this, i] { RunMix(i); });
  threads_.emplace_back([this] { RunPings(); });
  if (leads_) {
    threads_.emplace_back([this] { RunTraining(); });
    threads_.emplace_back([this] { RunPair(); });
  }
}

std::vector<std::string> Load::KindsOfWork() {
  std::vector<std::string> names = {kFill, kPing, kTrainingStep, kProcessGroup};
  for (const Kind& kind : kKinds) names.push_back(kind.name);
  return names;
}

void Load::Stop() {
  if (!stop_.HasBeenNotified()) stop_.Notify();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool Load::Pause(absl::Duration duration) {
  return !stop_.WaitForNotificationWithTimeout(duration);
}

std::map<std::string, WorkCount> Load::counts() const {
  absl::MutexLock lock(&mu_);
  return counts_;
}

absl::Duration Load::latest() const {
  absl::MutexLock lock(&mu_);
  return latest_;
}

Latencies Load::TakeLatencies() {
  absl::MutexLock lock(&mu_);
  return std::exchange(latencies_, {});
}

bool Load::CheckThatNothingHangs() {
  std::vector<const char*> hanging;
  {
    absl::MutexLock lock(&mu_);
    for (auto& [thread, current] : current_) {
      if (absl::Now() - current.since > kHangs) hanging.push_back(current.kind);
    }
  }
  for (const char* kind : hanging) {
    fail_(absl::StrCat(kind, ": it has not ended for ", absl::FormatDuration(kHangs)));
  }
  return hanging.empty();
}

void Load::Do(const char* kind, Random& random, const std::function<absl::Status(Work&)>& run) {
  Work work{random};
  const absl::Time begin = absl::Now();
  {
    absl::MutexLock lock(&mu_);
    current_[std::this_thread::get_id()] = {kind, begin};
  }
  absl::Status status;
  try {
    status = run(work);
  } catch (...) {
    status = StatusFromException(std::current_exception());
  }
  const bool excused = work.transient && (absl::IsUnavailable(status) || absl::IsNotFound(status));
  if (!status.ok() && !excused) fail_(absl::StrCat(kind, ": ", status.ToString()));
  absl::MutexLock lock(&mu_);
  current_.erase(std::this_thread::get_id());
  WorkCount& count = counts_[kind];
  if (status.ok()) ++count.done;
  if (excused) ++count.excused;
  count.longest = std::max(count.longest, absl::Now() - begin);
}

// ---------------------------------------------------------------------------------- The threads

absl::Status Load::FillPools() {
  const std::vector<std::string> self = {worker_->name()};
  std::vector<Future<Message>> calls;
  for (const std::string& name : leads_ ? worker_->names() : self) {
    for (int i = 0; i < kBlocked; ++i) {
      calls.push_back(
          worker_->CallAsync(name, "block", {}, {.deadline = Deadline::After(absl::Seconds(1))}));
    }
  }
  // They may end by their deadline, or with one who is gone.
  for (const Future<Message>& call : calls) call.Wait().IgnoreError();
  return absl::OkStatus();
}

void Load::RunMix(int thread) {
  Random random(seed_ + thread);
  if (thread == 0) Do(kFill, random, [&](Work&) { return FillPools(); });
  std::vector<int> weights;
  for (const Kind& kind : kKinds) weights.push_back(kind.weight);
  std::discrete_distribution<int> choose(weights.begin(), weights.end());
  while (Pause(UpTo(random, 2 * kMixGap))) {
    const Kind& kind = kKinds[choose(random)];
    Do(kind.name, random, [&](Work& work) { return (this->*kind.run)(work); });
  }
}

void Load::RunPings() {
  Random random(seed_ + 100);
  Pipe pipe;
  while (Pause(kPingGap)) {
    Do(kPing, random, [&](Work&) -> absl::Status {
      const absl::Time begin = absl::Now();
      DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(other_, "echo", {"ping", {}}));
      const absl::Time called = absl::Now();
      if (reply.payload != "ping") return Wrong("a ping");
      pipe.SendAndReceive();
      const absl::Time end = absl::Now();
      absl::MutexLock lock(&mu_);
      latencies_.call.push_back(absl::ToDoubleMicroseconds(called - begin));
      latencies_.pipe.push_back(absl::ToDoubleMicroseconds(end - called));
      return absl::OkStatus();
    });
  }
}

void Load::RunTraining() {
  Random random(seed_ + 200);
  for (int64_t step = 0; Pause(UpTo(random, 2 * kTrainingGap)); ++step) {
    Do(kTrainingStep, random, [&](Work& work) { return TrainingStep(work, step); });
  }
}

void Load::RunPair() {
  Random random(seed_ + 300);
  for (bool ends = false; !ends;) {
    bool is_done = false;
    Do(kProcessGroup, random, [&](Work&) {
      const absl::Status status = Average(&ends);
      is_done = status.ok();
      return status;
    });
    if (!is_done && !Pause(absl::Seconds(1))) return;
  }
}

// ---------------------------------------------------------------------------------------- Calls

std::string Load::Any(Work& work) {
  const std::vector<std::string> names = worker_->names();
  std::string name = names[Pick<size_t>(work.random, 0, names.size() - 1)];
  work.transient |= IsTransient(name);
  return name;
}

std::vector<std::string> Load::Path(Work& work) {
  std::vector<std::string> path(Pick<size_t>(work.random, 1, 3));
  for (std::string& name : path) name = Any(work);
  return path;
}

absl::Status Load::Small(Work& work) {
  const Message message{std::string(Pick(work.random, 0, 100), 'x'),
                        {at::full({4}, Pick(work.random, 0, 1000))}};
  DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(Any(work), "echo", message));
  const bool same = reply.payload == message.payload && reply.tensors.size() == 1 &&
                    reply.tensors[0].equal(message.tensors[0]);
  return same ? absl::OkStatus() : Wrong("a small call");
}

absl::Status Load::Large(Work& work) {
  const at::Tensor sent =
      at::arange(Pick<int64_t>(work.random, 64 << 10, 1 << 20), at::kFloat);  // up to 4 MiB
  DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(Any(work), "echo", {"", {sent}}));
  return reply.tensors.at(0).equal(sent) ? absl::OkStatus() : Wrong("a large call");
}

absl::Status Load::Many(Work& work) {
  const std::vector<std::string> names = worker_->names();
  const std::vector<WorkerRef> all(names.begin(), names.end());
  const auto replies = worker_->CallEach(all, "echo", {"all", {}});
  absl::Status first;
  for (size_t i = 0; i < names.size(); ++i) {
    absl::Status status = replies[i].status();
    if (replies[i].ok() && replies[i]->payload != "all") status = Wrong("a call of all");
    if (status.ok()) continue;
    // What is no excuse for one who lasts is none.
    if (!IsTransient(names[i])) {
      work.transient = false;
      return status;
    }
    work.transient = true;
    first.Update(status);
  }
  return first;
}

absl::Status Load::Operator(Work& work) {
  const at::Tensor a = at::full({3, 3}, 2), b = at::full({3, 3}, 3);
  DG_ASSIGN_OR_RETURN(const auto reply, worker_->CallOp(Any(work), "aten::add.Tensor", {a, b}));
  return reply.at(0).toTensor().equal(at::full({3, 3}, 5)) ? absl::OkStatus()
                                                           : Wrong("an operator");
}

absl::Status Load::Nested(Work& work) {
  const at::Tensor sent = at::full({100}, Pick(work.random, 0, 1000));
  const std::string path = absl::StrCat("echo ", absl::StrJoin(Path(work), " "));
  DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(Any(work), "relay", {path, {sent}}));
  return reply.tensors.at(0).equal(sent) ? absl::OkStatus() : Wrong("a nested call");
}

Future<Message> Load::CallWait(Work& work, CallOptions options) {
  if (Pick(work.random, 0, 1) == 0) {
    return worker_->CallAsync(Any(work), "wait", {}, std::move(options));
  }
  const std::string path = absl::StrCat("wait ", absl::StrJoin(Path(work), " "));
  return worker_->CallAsync(Any(work), "relay", {path, {}}, std::move(options));
}

absl::Status Load::Expires(Work& work) {
  const absl::Duration timeout = absl::Milliseconds(1) + UpTo(work.random, absl::Milliseconds(50));
  const absl::Time begin = absl::Now();
  const absl::Status status =
      CallWait(work, {.deadline = Deadline::After(timeout)}).Wait().status();
  const absl::Duration late = absl::Now() - begin - timeout;
  if (late > kLatest) {
    return absl::InternalError(
        absl::StrCat("a deadline has fired ", absl::FormatDuration(late), " late"));
  }
  {
    absl::MutexLock lock(&mu_);
    latest_ = std::max(latest_, late);
  }
  return ExpectCode(absl::StatusCode::kDeadlineExceeded, status);
}

absl::Status Load::ExpiresSoon(Work& work) {
  const Deadline deadline = Deadline::After(UpTo(work.random, absl::Microseconds(200)));
  const absl::Status status =
      worker_->Call(Any(work), "echo", {"soon", {}}, {.deadline = deadline}).status();
  return absl::IsDeadlineExceeded(status) ? absl::OkStatus() : status;
}

absl::Status Load::Cancelled(Work& work) {
  const auto cancellation = std::make_shared<Cancellation>();
  const Future<Message> call = CallWait(work, {.cancellation = cancellation});
  Pause(UpTo(work.random, absl::Milliseconds(10)));
  if (Pick(work.random, 0, 1) == 0) {
    call.Cancel();
  } else {
    cancellation->Cancel(absl::CancelledError("the soak does not want it"));
  }
  if (!call.WaitUntil(Deadline::After(kLatest))) {
    return absl::InternalError("a call that was cancelled goes on");
  }
  return ExpectCode(absl::StatusCode::kCancelled, call.Wait().status());
}

absl::Status Load::Fails(Work& work) {
  const bool throws = Pick(work.random, 0, 1) == 0;
  const absl::Status status =
      worker_->Call(Any(work), "fail", {throws ? "throw" : "", {}}).status();
  if (absl::StrContains(status.message(), "as it was asked to")) return absl::OkStatus();
  return ExpectCode(absl::StatusCode::kOutOfRange, status);
}

absl::Status Load::Unknown(Work& work) {
  return ExpectCode(absl::StatusCode::kNotFound,
                    worker_->Call(Any(work), "no such function", {}).status());
}

// --------------------------------------------------------------------------------------- Passes

absl::StatusOr<at::Tensor> Load::Scale(Context& context, const std::vector<std::string>& path,
                                       const at::Tensor& x) {
  at::Tensor y = x;
  for (const std::string& name : path) {
    DG_ASSIGN_OR_RETURN(const Message reply,
                        worker_->Call(name, "scale", {"", {y}}, {.context = &context}));
    y = reply.tensors.at(0);
  }
  return y;
}

absl::Status Load::Pass(Work& work) {
  const std::vector<std::string> path = Path(work);
  double product = 1;
  for (const std::string& name : path) product *= FactorOf(name);
  // Now and then so much that it goes the way of large packets.
  const int64_t size = Pick(work.random, 0, 9) == 0 ? 100'000 : Pick<int64_t>(work.random, 1, 100);
  Context context = worker_->NewContext();
  const at::Tensor x = at::full({size}, 1.5).requires_grad_();
  if (Pick(work.random, 0, 4) == 0) {
    // A call that fails leaves nothing that the pass would wait for.
    const auto failed = worker_->Call(path[0], "fail", {"", {x}}, {.context = &context});
    DG_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kOutOfRange, failed.status()));
  }
  DG_ASSIGN_OR_RETURN(const at::Tensor y, Scale(context, path, x));
  const int passes = Pick(work.random, 1, 2);
  for (int pass = 1; pass <= passes; ++pass) {
    DG_RETURN_IF_ERROR(context.Backward({y.sum()}, {.retain_graph = pass < passes}));
  }
  DG_ASSIGN_OR_RETURN(const at::Tensor gradient, context.Gradient(x));
  return gradient.equal(at::full({size}, passes * product)) ? absl::OkStatus() : Wrong("a pass");
}

absl::Status Load::PassGivenUp(Work& work) {
  const std::vector<std::string> path = Path(work);
  Context context = worker_->NewContext();
  const at::Tensor x = at::full({10}, 1.5).requires_grad_();
  DG_ASSIGN_OR_RETURN(const at::Tensor y, Scale(context, path, x));
  switch (Pick(work.random, 0, 2)) {
    case 0:  // the context's end is that of all
      return absl::OkStatus();
    case 1: {
      const Future<Unit> pass = context.BackwardAsync({y.sum()});
      pass.Cancel();
      if (!pass.WaitUntil(Deadline::After(kLatest))) {
        return absl::InternalError("a pass that was cancelled goes on");
      }
      const absl::Status& status = pass.Wait().status();
      return absl::IsCancelled(status) ? absl::OkStatus() : status;
    }
    default: {
      const auto deadline = Deadline::After(UpTo(work.random, absl::Milliseconds(1)));
      const absl::Status status = context.Backward({y.sum()}, {.deadline = deadline});
      return absl::IsDeadlineExceeded(status) ? absl::OkStatus() : status;
    }
  }
}

absl::Status Load::Sync(const std::string& worker) {
  const std::string& leader = worker_->name();
  DG_ASSIGN_OR_RETURN(const Message reply, worker_->Call(worker, "weight", {leader, {}}));
  const at::Tensor weight = reply.tensors.at(0);
  std::vector<at::Tensor>& known = weights_[worker];
  // One that has come back begins anew.
  if (known.empty() || IsTransient(worker)) known.push_back(InitialWeight(worker, leader));
  const bool is_known = std::any_of(known.begin(), known.end(),
                                    [&](const at::Tensor& one) { return one.equal(weight); });
  known = {weight.clone().requires_grad_()};
  return is_known ? absl::OkStatus() : Wrong(absl::StrCat("the weight of ", worker));
}

// The same on all workers of the path and here, where a replica of their weights is.
absl::Status Load::TrainingStep(Work& work, int64_t step) {
  const std::string& leader = worker_->name();
  // Each once: the order in which three gradients add up would change the last bit.
  const std::vector<std::string> drawn = Path(work);
  const std::set<std::string> path(drawn.begin(), drawn.end());
  for (const std::string& name : path) DG_RETURN_IF_ERROR(Sync(name));
  const at::Tensor input =
      at::sin(at::arange(8 * 16, at::kFloat).mul_(0.01 * static_cast<double>(step % 997 + 1)))
          .view({8, 16});
  const at::Tensor target = at::full({8, 16}, step % 2 == 0 ? 0.5 : -0.5);
  const auto loss_of = [&](const at::Tensor& y) { return (y - target).square().sum(); };

  Context context = worker_->NewContext();
  const at::Tensor x = input.clone().requires_grad_();
  at::Tensor y = x;
  for (const std::string& name : path) {
    DG_ASSIGN_OR_RETURN(const Message reply,
                        worker_->Call(name, "forward", {leader, {y}}, {.context = &context}));
    y = reply.tensors.at(0);
  }
  DG_RETURN_IF_ERROR(context.Backward({loss_of(y)}));
  DG_ASSIGN_OR_RETURN(const at::Tensor gradient, context.Gradient(x));

  const at::Tensor local_x = input.clone().requires_grad_();
  at::Tensor local_y = local_x;
  for (const std::string& name : path) local_y = Layer(weights_[name][0], local_y);
  if (!y.equal(local_y)) return Wrong("the model's output");
  loss_of(local_y).backward();
  if (!gradient.equal(local_x.grad())) return Wrong("the gradient of the input");
  for (const std::string& name : path) {
    std::vector<at::Tensor>& weight = weights_[name];
    const at::Tensor before = weight[0].detach().clone();
    torch::optim::SGD(std::vector<at::Tensor>{weight[0]}, kLearningRate).step();
    weight[0].mutable_grad().reset();
    weight.push_back(before);
  }
  // All workers step, those of the path or not.
  for (const std::string& name : worker_->names()) work.transient |= IsTransient(name);
  DG_RETURN_IF_ERROR(optimizers_->at(leader)->Step(context));
  for (auto& [name, weight] : weights_) weight.resize(1);
  return absl::OkStatus();
}

// -------------------------------------------------------------------------------- Process groups

absl::Status Load::Average(bool* ends) {
  const int rank = worker_->name() == kFront ? 0 : 1;
  DG_ASSIGN_OR_RETURN(const std::shared_ptr<ProcessGroup> group,
                      ProcessGroup::Create({.name = "leaders",
                                            .store = worker_->store(),
                                            .rank = rank,
                                            .size = 2,
                                            .timeout = kHangs,
                                            .join_timeout = kHangs,
                                            .host = worker_->host(),
                                            .cluster_key = worker_->cluster_key(),
                                            .certificates = worker_->certificates()}));
  const at::Tensor parameter = at::full({1000}, 1.0).requires_grad_();
  DG_ASSIGN_OR_RETURN(const auto averager,
                      GradientAverager::Create(group, {{"parameter", parameter}}, {}));
  for (int round = 0; round < kPairRounds; ++round) {
    parameter.mutable_grad().reset();
    (parameter * (rank == 0 ? 1.0 : 3.0)).sum().backward();
    if (!parameter.grad().equal(at::full({1000}, 2.0))) return Wrong("an average");
    // Both end where one of them is to.
    const at::Tensor is_last = at::full({1}, stop_.HasBeenNotified() ? 1.0 : 0.0);
    DG_RETURN_IF_ERROR(group->Average({is_last}));
    *ends = is_last.item<double>() > 0;
    if (*ends) break;
    Pause(kPairGap);
  }
  return absl::OkStatus();
}

}  // namespace distgrad
