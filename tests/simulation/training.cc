// Optimizer steps of all workers, and steps of pipelines.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "core/base/check.h"
#include "core/pipeline/pipeline.h"
#include "tests/simulation/job_run.h"
#include "tests/simulation/pipeline_model.h"
#include "tests/simulation/scheduler.h"
#include "tests/testing/cluster.h"

namespace distgrad::simulation {

// A training adds, at each worker of a path, a multiple of one of its two weights: a power of 16
// that is the training's own. The learning rate is 1; so the digits of a weight say, in the end,
// which steps have been taken there, and how often.
namespace {

constexpr int kWeights = 2;
constexpr int64_t kBase = 16;

int64_t ScaleOf(int training) {
  int64_t scale = 1;
  for (; training > 0; --training) scale *= kBase;
  return scale;
}

}  // namespace

void Job::RegisterTraining(Process* process) {
  for (int i = 0; i < kWeights; ++i) {
    process->weights.push_back(at::zeros({1}, at::kDouble).set_requires_grad(true));
  }
  // Bytes of the path: a worker, and which of its weights.
  Worker* const worker = process->worker.get();
  Must(worker->Register("weigh", [this, process, worker](Request& r) -> absl::StatusOr<Message> {
    const at::Tensor& scale = r.message.tensors.at(1);
    const at::Tensor& weight = process->weights[r.message.payload[1]];
    const at::Tensor y = at::add(r.message.tensors.at(0), at::mul(weight, scale));
    if (r.message.payload.size() == 2) return Message{"", {y}};
    return worker->Call(NameOf(r.message.payload[2]), "weigh",
                        {r.message.payload.substr(2), {y, scale}}, r.Nested());
  }));
  absl::StatusOr<std::unique_ptr<Optimizer>> optimizer =
      Optimizer::Create(worker, std::make_unique<torch::optim::SGD>(process->weights, 1.0));
  Must(optimizer.status());
  process->optimizer = *std::move(optimizer);
}

void Job::RunTrain(const Action& action, Process* process) {
  const std::string what = Text(action);
  std::mt19937_64 random(action.a);
  Worker* const worker = process->worker.get();
  std::string path;
  std::map<std::pair<int, int>, int> counts;  // by worker and weight
  const int passes = (action.c & Action::kTwoPasses) != 0 ? 2 : 1;
  for (int i = 1 + static_cast<int>(random() % 4); i > 0; --i) {
    const int at = static_cast<int>(random() % plan_.workers), weight = random() % kWeights;
    path.push_back(static_cast<char>(at));
    path.push_back(static_cast<char>(weight));
    counts[{at, weight}] += passes;
  }
  Doing doing{what, process, {action.actor}};
  for (const auto& [at, count] : counts) doing.workers.insert(at.first);
  // Whatever fails before the step begins is no step.
  const auto note = [&](Training::Taken taken) {
    absl::MutexLock lock(&mu_);
    trained_[action.b] = {taken, counts};
  };
  note(Training::kNowhere);
  Context context = worker->NewContext();
  const at::Tensor scale = at::full({1}, static_cast<double>(ScaleOf(action.b)), at::kDouble);
  const at::Tensor x = at::zeros({1}, at::kDouble).set_requires_grad(true);
  Deadline deadline = Deadline::After(kTimeout);
  const absl::StatusOr<Message> y = worker->Call(NameOf(path[0]), "weigh", {path, {x, scale}},
                                                 {.context = &context, .deadline = deadline});
  CheckEnd(doing.Part("its call"), y.status(), deadline);
  if (!y.ok()) return;
  for (int pass = 1; pass <= passes; ++pass) {
    deadline = Deadline::After(kTimeout);
    const absl::Status done = context.Backward(
        {y->tensors.at(0).sum()}, {.retain_graph = pass < passes, .deadline = deadline});
    CheckEnd(doing.Part("its pass"), done, deadline);
    if (!done.ok()) return;
  }
  doing = doing.With(DoingOfAll(what, process).workers);
  if ((action.c & Action::kClips) != 0) {
    deadline = Deadline::After(2 * kTimeout);
    const absl::StatusOr<double> norm = process->optimizer->ClipGradients(context, 1e30);
    CheckEnd(doing.Part("its norm"), norm.status(), deadline);
    if (!norm.ok()) return;
    double squares = 0;
    for (const auto& [at, count] : counts) {
      squares += std::pow(static_cast<double>(count * ScaleOf(action.b)), 2);
    }
    if (std::abs(*norm - std::sqrt(squares)) > 1e-9 * *norm) {
      Wrong(absl::StrCat(what, ": the norm is ", *norm, " and not ", std::sqrt(squares)));
    }
  }
  note(Training::kPerhaps);
  deadline = Deadline::After(kTimeout);
  const absl::Status stepped = process->optimizer->Step(context);
  CheckEnd(doing.Part("its step"), stepped, deadline);
  if (stepped.ok()) note(Training::kEverywhere);
}

void Job::CheckTrained() {
  absl::MutexLock lock(&mu_);
  for (int i = 0; i < plan_.workers; ++i) {
    const std::shared_ptr<Process>& process = processes_[i];
    if (process == nullptr) continue;
    for (int weight = 0; weight < kWeights; ++weight) {
      auto rest = static_cast<int64_t>(-process->weights[weight].item<double>());
      for (int training = 0; training < kMostTrained; ++training, rest /= kBase) {
        const auto found = trained_.find(training);
        int count = 0;
        Training::Taken taken = Training::kNowhere;
        if (found != trained_.end()) {
          const auto at = found->second.counts.find({i, weight});
          if (at != found->second.counts.end()) count = at->second;
          taken = found->second.taken;
        }
        // What came back has begun anew.
        if (taken == Training::kEverywhere && !process->is_first) taken = Training::kPerhaps;
        const auto digit = static_cast<int>(rest % kBase);
        const bool right = (digit == count && taken != Training::kNowhere) ||
                           (digit == 0 && (taken != Training::kEverywhere || count == 0));
        if (right || !wrong_.empty()) continue;
        wrong_ = absl::StrCat("the step of training ", training, " has moved weight ", weight,
                              " of worker", i, " ", digit, " times, and not ", count);
      }
    }
  }
}

// ----------------------------------------------------------------------------------- Pipelines

PipelineModel::PipelineModel(const Action& action, int workers)
    : name(absl::StrCat("pipe", action.a)), fails((action.c & Action::kFails) != 0) {
  std::mt19937_64 random(action.a);
  const int ranks = 1 + static_cast<int>(random() % 4);
  in_flight = action.a % 2 == 0 ? 1 : 3;
  has_rivals = action.a % 4 == 2 && action.c == 0;
  divides_otherwise = has_rivals && action.a % 8 == 2;
  const int micro_batches = 1 + static_cast<int>(random() % 5);
  absl::StatusOr<distgrad::Schedule> made;
  switch (random() % 4) {
    case 0:
      made = GPipe(ranks, micro_batches);
      break;
    case 1:
      made = OneForwardOneBackward(ranks, micro_batches);
      break;
    case 2:
      made = InterleavedOneForwardOneBackward(ranks, 2, micro_batches);
      break;
    default:
      made = ZeroBubbleH1(ranks, micro_batches);
      break;
  }
  Must(made.status());
  schedule = *std::move(made);
  if (in_flight > 1) schedule = WithSteps(std::move(schedule));
  for (int rank = 0; rank < ranks; ++rank) {
    worker_of_rank.push_back(static_cast<int>(random() % workers));
  }
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    weights.push_back(Constant(0.1 * (stage + 1)).set_requires_grad(true));
  }
  const int64_t rows = 2 * micro_batches;
  input = at::full({rows, 2}, 0.5, at::kDouble);
  target = at::full({rows, 2}, 0.25, at::kDouble);
  for (int64_t row = 0; row < rows; ++row) input[row].mul_(static_cast<double>(row + 1) / 4);
}

std::vector<at::Tensor> PipelineModel::Compute(int stage, const std::vector<at::Tensor>& in) const {
  return {at::tanh(at::mm(in.at(0), weights[stage]))};
}

at::Tensor PipelineModel::Loss(const std::vector<at::Tensor>& out,
                               const std::vector<at::Tensor>& wanted) const {
  return at::mse_loss(out.at(0), wanted.at(0));
}

void Job::RegisterPipelines(Process* process, int i) {
  for (const auto& [key, owned] : pipelines_) {
    PipelineModel* const model = owned.get();
    std::map<int, PipelineStage> stages;
    for (int stage = 0; stage < model->schedule.stages(); ++stage) {
      if (model->worker_of_rank[model->schedule.rank_of_stage[stage]] != i) continue;
      stages[stage] = {
          .forward =
              [model, stage](Tensors in) {
                const bool may_fail = model->fails && stage + 1 == model->schedule.stages();
                TORCH_CHECK(!may_fail || model->has_failed.exchange(true), "on fire");
                return model->Compute(stage, in);
              },
          .loss = [model](Tensors out, Tensors target) { return model->Loss(out, target); },
          .step =
              [model, stage](const Context& context) {
                absl::MutexLock lock(&model->mu);
                model->stepped[context.id()].insert(stage);
                return absl::OkStatus();
              }};
    }
    if (stages.empty()) continue;
    auto made = PipelineStages::Create(process->worker.get(), model->name, std::move(stages));
    Must(made.status());
    process->stages.push_back(*std::move(made));
  }
  // The gradient of a pipeline's stage, by its name and number.
  Must(process->worker->Register("stage gradient", [this](Request& r) -> absl::StatusOr<Message> {
    const std::vector<std::string> words = absl::StrSplit(r.message.payload, ' ');
    int key = 0, stage = 0;
    DG_CHECK(absl::SimpleAtoi(words.at(0), &key) && absl::SimpleAtoi(words.at(1), &stage));
    absl::StatusOr<at::Tensor> gradient = r.context.Gradient(pipelines_.at(key)->weights[stage]);
    if (!gradient.ok()) return gradient.status();
    return Message{"", {*gradient}};
  }));
}

namespace {

Deadline NewDeadline(const Action& action) {
  return action.b == Action::kByDeadline ? Deadline::After(absl::Milliseconds(Draw() % 60))
                                         : Deadline::After(kTimeout);
}

// The same stages, each in a rank of its own.
distgrad::Schedule ByStages(const PipelineModel& model) {
  return *GPipe(model.schedule.stages(), model.schedule.micro_batches);
}

std::unique_ptr<Pipeline> NewPipeline(Worker* worker, const PipelineModel& model,
                                      const distgrad::Schedule& schedule) {
  std::vector<std::string> workers(schedule.ranks());
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    workers[schedule.rank_of_stage[stage]] =
        WorkerName(model.worker_of_rank[model.schedule.rank_of_stage[stage]]);
  }
  auto pipeline =
      Pipeline::Create(worker, {.name = model.name, .workers = workers, .schedule = schedule});
  Must(pipeline.status());
  return *std::move(pipeline);
}

}  // namespace

void Job::RunPipeline(const Action& action, Process* process) {
  Worker* const worker = process->worker.get();
  const std::string what = Text(action);
  PipelineModel& model = *pipelines_.at(action.a);
  model.has_run = true;
  if (model.has_rivals) return RunRivals(action);
  Doing doing{what, process, {action.actor}};
  doing.workers.insert(model.worker_of_rank.begin(), model.worker_of_rank.end());
  const auto pipeline = NewPipeline(worker, model, model.schedule);
  if ((action.c & Action::kEvaluates) != 0) {
    const Deadline deadline = NewDeadline(action);
    CheckPipeline(action, doing, nullptr,
                  pipeline->Evaluate({model.input}, {model.target}, deadline), deadline);
    return;
  }
  struct Started {
    Context context;
    Deadline deadline;
    PipelineStep step;
  };
  std::vector<Started> started;
  for (int i = 0; i < model.in_flight; ++i) {
    Started next{worker->NewContext(), NewDeadline(action), {}};
    absl::StatusOr<PipelineStep> step =
        pipeline->Start(next.context, {model.input}, {model.target}, next.deadline);
    if (!step.ok()) {
      // One that has failed already; which is checked below.
      if (i == 0 || !absl::IsFailedPrecondition(step.status())) {
        CheckPipeline(action, doing, nullptr, step.status(), next.deadline);
      }
      break;
    }
    next.step = *std::move(step);
    started.push_back(std::move(next));
  }
  bool failed = false;
  for (Started& each : started) {
    // What it says of one that has failed takes time, for each of them.
    const Deadline deadline = std::max(each.deadline, Deadline::After(absl::ZeroDuration()));
    const absl::StatusOr<PipelineResult> result = each.step.Wait();
    if (failed && result.ok()) Wrong(absl::StrCat(what, ": OK behind a step that has failed"));
    failed = failed || !result.ok();
    CheckPipeline(action, doing, &each.context, result, deadline);
  }
  for (size_t i = 1; i < started.size() && model.in_flight > 1; ++i) {
    absl::MutexLock lock(&model.mu);
    const std::set<int>& before = model.stepped[started[i - 1].context.id()];
    for (const int stage : model.stepped[started[i].context.id()]) {
      if (before.count(stage) > 0) continue;
      Wrong(
          absl::StrCat(what, ": stage ", stage, " has stepped behind a step in which it has not"));
    }
  }
  if (!failed && !started.empty() && started.size() < static_cast<size_t>(model.in_flight) &&
      !IsDisturbed(doing) && action.b != Action::kByDeadline && !model.fails) {
    Wrong(absl::StrCat(what, ": not started, though none before it has failed"));
  }
}

// Several drivers, of which one at a time has the stages. Who is refused has nothing of them.
void Job::RunRivals(const Action& action) {
  constexpr int kDrivers = 3;
  const std::string what = Text(action);
  const PipelineModel& model = *pipelines_.at(action.a);
  std::atomic<int> refused{0};
  Doing doing{what, nullptr, {}};
  doing.workers.insert(model.worker_of_rank.begin(), model.worker_of_rank.end());
  const auto driver = [&](int i) { return (action.actor + i) % plan_.workers; };
  for (int i = 0; i < kDrivers; ++i) doing.workers.insert(driver(i));
  std::vector<std::thread> threads;
  const MustStart must_start;
  for (int i = 0; i < kDrivers; ++i) {
    threads.emplace_back([&, i] {
      const std::shared_ptr<Process> process = ProcessAt(driver(i));
      if (process == nullptr) return;
      const InProcess in_process(process->number);
      Worker* const worker = process->worker.get();
      const bool by_stages = model.divides_otherwise && i % 2 == 1;
      const auto pipeline =
          NewPipeline(worker, model, by_stages ? ByStages(model) : model.schedule);
      const Context context = worker->NewContext();
      const Deadline deadline = NewDeadline(action);
      const absl::StatusOr<PipelineResult> result =
          pipeline->Train(context, {model.input}, {model.target}, deadline);
      if (absl::IsFailedPrecondition(result.status()) &&
          absl::StrContains(result.status().message(), "a stage runs one step at a time")) {
        ++refused;
        return CheckEnd(doing.Part("refused"), absl::OkStatus(), deadline);
      }
      Doing mine = doing;
      mine.process = process.get();
      CheckPipeline(action, mine, &context, result, deadline);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (refused == kDrivers && !model.divides_otherwise && !IsDisturbed(doing) &&
      action.b != Action::kByDeadline) {
    Wrong(what + ": each driver was refused, and none had a step");
  }
}

// Whoever drove them and failed, was refused or is lost keeps no stages for good.
void Job::CheckStagesAreFree() {
  for (const auto& [key, model] : pipelines_) {
    const std::vector<int>& owners = model->worker_of_rank;
    const auto is_dead = [this](int worker) { return WorkerAt(worker) == nullptr; };
    if (!model->has_run || std::any_of(owners.begin(), owners.end(), is_dead)) continue;
    model->has_failed = true;  // once
    // In ranks of other stages: what is left of a step would be in its way most there.
    const auto pipeline = NewPipeline(WorkerAt(owners[0]).get(), *model, ByStages(*model));
    // The first call to a worker that has come back may meet a connection with what it was before.
    // And a thread may stand still in a function of a step whose deadline has passed.
    const Deadline end = Deadline::After(absl::Seconds(5));
    absl::Status status;
    while (true) {
      const Deadline deadline = Deadline::After(kTimeout);
      status = pipeline->Evaluate({model->input}, {model->target}, deadline).status();
      if (status.ok() || end.Passed()) break;
      absl::SleepFor(absl::Seconds(1));
    }
    if (!status.ok()) {
      Wrong(absl::StrCat("when all is over, ", model->name, " takes no step: ", status.ToString()));
    }
  }
}

void Job::CheckPipeline(const Action& action, const Doing& doing, const Context* context,
                        const absl::StatusOr<PipelineResult>& result, Deadline deadline) {
  const std::string what = Text(action);
  const PipelineModel& model = *pipelines_.at(action.a);
  if (model.fails) {
    if (result.ok()) return Wrong(absl::StrCat(what, ": OK, though it throws"));
    if (absl::StrContains(result.status().message(), "on fire")) return;
  }
  CheckEnd(doing, result.status(), deadline, action.b);
  if (!result.ok()) return;
  Tensors at = {model.input};
  for (int stage = 0; stage < model.schedule.stages(); ++stage) at = model.Compute(stage, at);
  const at::Tensor loss = model.Loss(at, {model.target});
  if (!at::allclose(result->loss, loss)) Wrong(absl::StrCat(what, ": another loss"));
  if (context == nullptr) return;
  const Tensors want = torch::autograd::grad({loss}, model.weights);
  for (int stage = 0; stage < model.schedule.stages(); ++stage) {
    const int of = model.worker_of_rank[model.schedule.rank_of_stage[stage]];
    const Deadline until = Deadline::After(kTimeout);
    const absl::StatusOr<Message> got = doing.process->worker->Call(
        WorkerName(of), "stage gradient", {absl::StrCat(action.a, " ", stage), {}},
        {.context = context, .deadline = until});
    CheckEnd(doing.Part("asking for a gradient"), got.status(), until);
    if (got.ok() && !at::allclose(got->tensors.at(0), want[stage])) {
      Wrong(absl::StrCat(what, ": the gradient of stage ", stage, " is not that of one process"));
    }
  }
}

}  // namespace distgrad::simulation
