// Cuts a batch, begins a step on every rank, and waits for all of them or the first error.
#include "core/pipeline/pipeline.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor_split.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "core/base/cancellation.h"
#include "core/base/future.h"
#include "core/base/random.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/base/wire.h"
#include "core/pipeline/step_calls.h"
#include "core/pipeline/step_plan.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;

// How long ranks are asked about a step that has failed, once its deadline has passed.
constexpr absl::Duration kPatience = absl::Seconds(2);
// How long a worker whose threads are all taken may still serve the end of a step.
constexpr absl::Duration kEndIsServed = absl::Minutes(1);

// "stages 0, 2 on worker 'front'".
std::string DescribeRank(const Schedule& schedule, int rank, const std::string& worker) {
  std::vector<int> stages;
  for (int s = 0; s < schedule.stages(); ++s) {
    if (schedule.rank_of_stage[s] == rank) stages.push_back(s);
  }
  return absl::StrCat(stages.size() == 1 ? "stage " : "stages ", absl::StrJoin(stages, ", "),
                      " on worker '", worker, "'");
}

// The ranks by the names of their workers, and on one worker by their first stages.
std::vector<int> RanksByWorker(const Schedule& schedule, const std::vector<std::string>& workers) {
  std::vector<int> ranks(schedule.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto place = [&](int rank) {
    return std::pair(absl::string_view(workers[rank]), FirstStage(schedule.rank_of_stage, rank));
  };
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) { return place(a) < place(b); });
  return ranks;
}

// By micro-batch, and how many elements each has.
struct MicroBatches {
  std::vector<Tensors> inputs, targets;
  std::vector<int64_t> sizes;
};

absl::StatusOr<MicroBatches> Cut(const Tensors& inputs, const Tensors& targets, int count,
                                 bool backward) {
  MicroBatches cut;
  cut.inputs.resize(count);
  cut.targets.resize(count);
  int64_t batch = -1;
  const auto add = [&](const Tensors& tensors, const char* what,
                       std::vector<Tensors>& parts) -> absl::Status {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      if (!tensor.defined() || tensor.dim() < 1) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, " ", i, " has no dimension that is the batch"));
      }
      if (tensor.layout() != at::kStrided) {
        return absl::InvalidArgumentError(
            c10::str(what, " ", i, " is of layout ", tensor.layout(),
                     ", and only a dense one can be cut into micro-batches; pass its indices and "
                     "values, or make it dense"));
      }
      // Whatever has made it would not be trained, and nobody would hear of it.
      if (backward && tensor.requires_grad()) {
        return absl::InvalidArgumentError(absl::StrCat(
            what, " ", i,
            " requires grad, and no gradient goes back from the stages to a batch: compute it in "
            "the first stage or in the loss, or detach it"));
      }
      if (batch < 0) batch = tensor.size(0);
      if (tensor.size(0) != batch || batch < count) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, " ", i, " has ", tensor.size(0), " elements for a batch of ", batch,
                         " in ", count, " micro-batches",
                         batch < count ? absl::StrCat(", which needs at least ", count) : ""));
      }
      const Tensors pieces = at::tensor_split(tensor.detach(), count);
      for (int m = 0; m < count; ++m) parts[m].push_back(pieces[m]);
    }
    return absl::OkStatus();
  };
  if (inputs.empty()) return absl::InvalidArgumentError("a batch has at least one input");
  DG_RETURN_IF_ERROR(add(inputs, "input", cut.inputs));
  DG_RETURN_IF_ERROR(add(targets, "target", cut.targets));
  for (int m = 0; m < count; ++m) cut.sizes.push_back(cut.inputs[m][0].size(0));
  return cut;
}

// What the ranks have in common.
struct Shared {
  std::map<std::string, std::vector<int>> tied;  // where several have it: the ranks, by name
  std::vector<uint64_t> averagers;               // by rank; 0: does not average over replicas
};

absl::StatusOr<Shared> SharedOf(const Schedule& schedule,
                                const std::vector<Future<Message>>& begun) {
  Shared shared;
  std::map<std::string, std::vector<int>>& all = shared.tied;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    DG_ASSIGN_OR_RETURN(const Begun of_rank, DecodeBegun(begun[rank].Wait()->payload));
    for (const std::string& name : of_rank.names) all[name].push_back(rank);
    shared.averagers.push_back(of_rank.averager);
  }
  for (auto each = all.begin(); each != all.end();) {
    each = each->second.size() > 1 ? std::next(each) : all.erase(each);
  }
  return shared;
}

// The stages of each rank that have a step in the schedule.
std::vector<std::set<int>> StagesThatStep(const Schedule& schedule) {
  std::vector<std::set<int>> stages(schedule.ranks());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.lists[rank]) {
      if (action.kind == Action::Kind::kStep) stages[rank].insert(action.stage);
    }
  }
  return stages;
}

std::string DescribeStepped(const absl::StatusOr<Stepped>& stepped, int stage) {
  if (!stepped.ok()) {
    return absl::StrCat("may have stepped, or be in its step (", stepped.status().message(), ")");
  }
  const auto found = stepped->find(stage);
  if (found == stepped->end()) return "has not stepped";
  return found->second ? "has stepped" : "has failed in its step";
}

// Waits for the answers of ranks, by rank, and asks those again on whose way there was no room:
// side by side, for each may wait long. False if there was no memory for some of that.
bool AskAgainWhereFull(std::map<int, Future<Message>>& answers,
                       absl::FunctionRef<absl::StatusOr<Message>(const Future<Message>&)> answer_of,
                       absl::FunctionRef<Future<Message>(int rank)> ask) {
  std::atomic<bool> has_memory{true};
  std::vector<std::thread> threads;
  threads.reserve(answers.size());
  absl::Cleanup join = [&threads] {
    for (std::thread& thread : threads) thread.join();
  };
  for (auto& [rank, answer] : answers) {
    if (answer.Done() && !absl::IsResourceExhausted(answer.Wait().status())) continue;
    const auto ask_again = [&, rank = rank, &answer = answer] {
      try {
        if (absl::IsResourceExhausted(answer_of(answer).status())) answer = ask(rank);
      } catch (...) {
        has_memory = false;
      }
    };
    absl::StatusOr<std::thread> thread = StartThread(absl::StrCat("dg-step-end-", rank), ask_again);
    if (thread.ok()) {
      threads.push_back(*std::move(thread));
    } else {
      ask_again();
    }
  }
  std::move(join).Invoke();
  return has_memory;
}

}  // namespace

struct PipelineStep::Running {
  Running(Pipeline* pipeline, Worker* worker, const std::string& name, const Schedule& schedule,
          Deadline deadline, bool has_default_deadline)
      : pipeline(pipeline),
        schedule(schedule),
        deadline(deadline),
        has_default_deadline(has_default_deadline),
        calls(worker, name, deadline, cancellation) {}

  // Reads what the ranks have answered.
  absl::Status Read(PipelineResult* result) const;

  Pipeline* const pipeline;
  const Schedule& schedule;
  const Deadline deadline;
  const bool has_default_deadline;
  const uint64_t step = RandomNumber();
  const std::shared_ptr<Cancellation> cancellation = std::make_shared<Cancellation>();
  StepCalls calls;
  std::vector<double> weights;        // by micro-batch
  std::vector<Future<Message>> runs;  // by rank
  // Made before there may be no memory for it.
  const absl::Status left = absl::CancelledError("nobody waits for the step of the pipeline");
};

absl::Status PipelineStep::Running::Read(PipelineResult* result) const {
  const Message reply = *runs[schedule.rank_of_stage.back()].Wait();
  WireReader reader(reply.payload);
  size_t next = 0;
  const auto take = [&]() -> at::Tensor {
    return next < reply.tensors.size() ? reply.tensors[next++] : at::Tensor();
  };
  for (int m = 0; m < schedule.micro_batches; ++m) {
    if (reader.U8() != 0) {
      result->losses.push_back(take());
      if (!result->losses.back().defined()) {
        return absl::InternalError("the last stage has given no loss");
      }
      const at::Tensor part = result->losses.back() * weights[m];
      result->loss = m == 0 ? part : result->loss + part;
    }
    const uint32_t outputs = reader.U32();
    if (schedule.backward) continue;
    Tensors& of_this = result->outputs.emplace_back();
    while (of_this.size() < outputs && next < reply.tensors.size()) of_this.push_back(take());
  }
  return reader.status("the result of a pipeline's step");
}

PipelineStep::PipelineStep() = default;
PipelineStep::PipelineStep(std::unique_ptr<Running> running) : running_(std::move(running)) {}
PipelineStep::PipelineStep(PipelineStep&& other) noexcept = default;
PipelineStep& PipelineStep::operator=(PipelineStep&& other) noexcept {
  const PipelineStep ended(std::move(*this));
  running_ = std::move(other.running_);
  return *this;
}

PipelineStep::~PipelineStep() {
  if (running_ == nullptr) return;
  running_->cancellation->Cancel(running_->left);
  try {
    running_->pipeline->Finish(*running_).status().IgnoreError();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): its calls end it all the same
  }
}

absl::StatusOr<PipelineResult> PipelineStep::Wait() {
  if (running_ == nullptr) {
    return absl::FailedPreconditionError("there is no step of a pipeline to wait for");
  }
  const std::unique_ptr<Running> running = std::move(running_);
  return running->pipeline->Finish(*running);
}

Pipeline::Pipeline(Worker* worker, PipelineOptions options, Schedule evaluation)
    : worker_(worker),
      id_(RandomNumber()),
      options_(std::move(options)),
      evaluation_(std::move(evaluation)) {}

absl::StatusOr<std::unique_ptr<Pipeline>> Pipeline::Create(Worker* worker,
                                                           PipelineOptions options) {
  const Schedule& schedule = options.schedule;
  const std::string who = absl::StrCat("pipeline '", options.name, "'");
  if (options.name.size() > kMaxPipelineName) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of a pipeline has at most ", kMaxPipelineName, " bytes"));
  }
  DG_RETURN_IF_ERROR(Annotate(Check(schedule), absl::StrCat("the schedule of ", who)));
  if (!schedule.backward) {
    return absl::InvalidArgumentError(absl::StrCat("the schedule of ", who, " has no backward"));
  }
  if (options.workers.size() != schedule.lists.size()) {
    return absl::InvalidArgumentError(absl::StrCat(who, " has ", options.workers.size(),
                                                   " workers for ", schedule.ranks(), " ranks"));
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (schedule.lists[rank].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " of ", who, " has nothing to do"));
    }
  }
  DG_ASSIGN_OR_RETURN(Schedule evaluation,
                      ForwardOnly(schedule.rank_of_stage, schedule.micro_batches));
  return std::unique_ptr<Pipeline>(new Pipeline(worker, std::move(options), std::move(evaluation)));
}

absl::StatusOr<PipelineResult> Pipeline::Train(const Context& context, Tensors inputs,
                                               Tensors targets, Deadline deadline) {
  if (!context.valid()) return absl::FailedPreconditionError("there is no context");
  DG_ASSIGN_OR_RETURN(PipelineStep step, Start(options_.schedule, context, std::move(inputs),
                                               std::move(targets), deadline, /*alone=*/true));
  return step.Wait();
}

absl::StatusOr<PipelineStep> Pipeline::Start(const Context& context, Tensors inputs,
                                             Tensors targets, Deadline deadline) {
  if (!context.valid()) return absl::FailedPreconditionError("there is no context");
  return Start(options_.schedule, context, std::move(inputs), std::move(targets), deadline,
               /*alone=*/false);
}

absl::StatusOr<PipelineResult> Pipeline::Evaluate(Tensors inputs, Tensors targets,
                                                  Deadline deadline) {
  try {
    // Its release frees the stages of a rank that cannot be told of the end: all that know of a
    // context hear that it is released as soon as they can be reached.
    const Context context = worker_->NewContext();
    DG_ASSIGN_OR_RETURN(PipelineStep step, Start(evaluation_, context, std::move(inputs),
                                                 std::move(targets), deadline, /*alone=*/true));
    return step.Wait();
  } catch (...) {  // there was no memory
    return StatusFromException(std::current_exception());
  }
}

absl::Status Pipeline::BeginStart(bool alone, uint64_t* follows) {
  absl::MutexLock lock(&mu_);
  if (alone && (starts_ || !in_flight_.empty())) {
    return absl::FailedPreconditionError(
        absl::StrCat("a step of pipeline '", options_.name, "' runs already"));
  }
  if (starts_) {
    return absl::FailedPreconditionError(
        absl::StrCat("another thread starts a step of pipeline '", options_.name, "'"));
  }
  if (in_flight_.size() == kMostStepsInFlight) {
    return absl::FailedPreconditionError(
        absl::StrCat(kMostStepsInFlight, " steps of pipeline '", options_.name,
                     "' were started, and nobody has waited for them: wait for the first one "
                     "(PipelineStep::Wait; in C dg_pipeline_step_wait)"));
  }
  for (const InFlight& each : in_flight_) {
    if (each.cancellation->cancelled()) {
      return absl::FailedPreconditionError(
          absl::StrCat("a step of pipeline '", options_.name,
                       "' has failed behind which this one would come: wait for it, and for all "
                       "others that were started (",
                       each.cancellation->why().message(), ")"));
    }
    *follows = each.step;
  }
  starts_ = true;
  before_failed_ = false;
  return absl::OkStatus();
}

void Pipeline::EndFollowers(uint64_t step, const absl::Status& failure) {
  const absl::Status why = Annotate(failure, "the step before this one has failed");
  std::vector<std::shared_ptr<Cancellation>> followers;
  {
    absl::MutexLock lock(&mu_);
    auto each = std::find_if(in_flight_.begin(), in_flight_.end(),
                             [&](const InFlight& one) { return one.step == step; });
    before_failed_ = true;
    while (each != in_flight_.end() && ++each != in_flight_.end()) {
      followers.push_back(each->cancellation);
      each->before.Update(why);
    }
  }
  for (const std::shared_ptr<Cancellation>& follower : followers) follower->Cancel(why);
}

absl::Status Pipeline::Before(uint64_t step) const {
  absl::MutexLock lock(&mu_);
  for (const InFlight& each : in_flight_) {
    if (each.step == step) return each.before;
  }
  return absl::OkStatus();
}

void Pipeline::Forget(uint64_t step) {
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [&](const InFlight& one) { return one.step == step; });
  if (found != in_flight_.end()) in_flight_.erase(found);
}

absl::StatusOr<PipelineStep> Pipeline::Start(const Schedule& schedule, const Context& context,
                                             Tensors inputs, Tensors targets, Deadline deadline,
                                             bool alone) {
  // One for all calls of the step: each would have its own.
  const bool has_default_deadline = deadline == absl::InfinitePast();
  if (has_default_deadline) deadline = worker_->DefaultDeadline();
  uint64_t follows = 0;
  DG_RETURN_IF_ERROR(BeginStart(alone, &follows));
  const absl::Cleanup end = [this] {
    absl::MutexLock lock(&mu_);
    starts_ = false;
  };
  try {
    const at::AutoGradMode grad_mode(false);
    const std::string who = absl::StrCat("pipeline '", options_.name, "'");
    const int count = schedule.micro_batches;
    absl::StatusOr<MicroBatches> cut = Cut(inputs, targets, count, schedule.backward);
    if (!cut.ok()) return Annotate(cut.status(), who);
    DG_RETURN_IF_ERROR(TellAgain(deadline));
    auto running = std::make_unique<PipelineStep::Running>(this, worker_, options_.name, schedule,
                                                           deadline, has_default_deadline);
    const bool mean = options_.reduction == PipelineOptions::Reduction::kMean;
    int64_t batch = 0;
    for (const int64_t size : cut->sizes) batch += size;
    for (const int64_t size : cut->sizes) {
      running->weights.push_back(mean ? static_cast<double>(size) / static_cast<double>(batch)
                                      : 1.0);
    }
    StepPlan plan{.step = running->step,
                  .pipeline = id_,
                  .follows = follows,
                  .micro_batches = count,
                  .backward = schedule.backward,
                  .has_targets = !targets.empty(),
                  .rank_of_stage = schedule.rank_of_stage,
                  .workers = options_.workers,
                  .weights = running->weights};

    StepCalls& calls = running->calls;
    std::vector<Future<Message>> begun(schedule.ranks());
    std::vector<int> asked;  // ranks
    absl::Cleanup give_back = [&] {
      // A begin that is on its way, as where there was no memory to wait for it, would come behind
      // this, and even behind that of the next step.
      calls.Wait().IgnoreError();
      GiveBack(schedule, plan.step, asked);
      Forget(plan.step);
    };
    // All of them know of the step before anything of it is sent. They are asked one after the
    // other, by all drivers in one order: of two that begin at one moment, the one that is first on
    // the first worker that both need has the others, too.
    for (const int rank : RanksByWorker(schedule, options_.workers)) {
      plan.rank = rank;
      plan.list = schedule.lists[rank];
      const std::string& worker = options_.workers[rank];
      asked.push_back(rank);
      begun[rank] = calls.Make(
          worker, kBeginStep, {EncodePlan(plan), {}},
          absl::StrCat("beginning a step of ", who, ", ", DescribeRank(schedule, rank, worker)),
          &context);
      DG_RETURN_IF_ERROR(calls.Wait());
    }
    DG_ASSIGN_OR_RETURN(const Shared shared, SharedOf(schedule, begun));
    DG_RETURN_IF_ERROR(CheckOneEach(shared.averagers));
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      DG_RETURN_IF_ERROR(CheckAverager(rank, shared.averagers[rank], deadline));
    }
    const auto averages = std::find_if(shared.averagers.begin(), shared.averagers.end(),
                                       [](uint64_t averager) { return averager != 0; });
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      const std::string& worker = options_.workers[rank];
      Ties ties{{plan.step, FirstStage(schedule.rank_of_stage, rank)}, shared.tied, ""};
      if (averages != shared.averagers.end() && shared.averagers[rank] == 0) {
        ties.averages = options_.workers[averages - shared.averagers.begin()];
      }
      if (ties.ranks.empty() && ties.averages.empty()) continue;
      calls.Make(worker, kTieStep, {EncodeTies(ties), {}},
                 absl::StrCat("saying what the ranks of ", who, " share to ",
                              DescribeRank(schedule, rank, worker)));
    }
    DG_RETURN_IF_ERROR(calls.Wait());
    {
      absl::MutexLock lock(&mu_);
      // Another thread has waited for it meanwhile.
      if (before_failed_) {
        return absl::FailedPreconditionError(
            absl::StrCat("the step of ", who, " behind which this one would come has failed"));
      }
      in_flight_.push_back({plan.step, running->cancellation, absl::OkStatus()});
      // From now on there is nothing but success, or their answers, that takes them out again: also
      // where there is no memory for what follows.
      for (int rank = 0; rank < schedule.ranks(); ++rank) {
        if (shared.averagers[rank] == 0) continue;
        const StepRef ref{plan.step, FirstStage(schedule.rank_of_stage, rank)};
        untold_[{plan.step, rank}] = EncodeEnd({ref, shared.averagers[rank]});
      }
    }
    std::move(give_back).Cancel();
    // Ends the step, should there be no memory for what follows.
    PipelineStep step(std::move(running));
    const std::shared_ptr<Cancellation> cancellation = step.running_->cancellation;
    std::vector<Future<Message>>& runs = step.running_->runs;

    const int last = schedule.stages() - 1;
    try {
      for (int rank = 0; rank < schedule.ranks(); ++rank) {
        const std::string& worker = options_.workers[rank];
        runs.push_back(calls.Make(
            worker, kRunStep,
            {EncodeStepRef({plan.step, FirstStage(schedule.rank_of_stage, rank)}), {}},
            absl::StrCat("a step of ", who, ", ", DescribeRank(schedule, rank, worker))));
      }
      const auto deliver = [&](Parcel::Kind kind, int stage, int m, Tensors tensors) {
        const int rank = schedule.rank_of_stage[stage];
        const std::string& worker = options_.workers[rank];
        calls.Deliver(worker,
                      {.to = {plan.step, FirstStage(schedule.rank_of_stage, rank)},
                       .kind = kind,
                       .stage = stage,
                       .micro_batch = m},
                      std::move(tensors),
                      absl::StrCat("sending micro-batch ", m, " of a step of ", who, " to stage ",
                                   stage, " on worker '", worker, "'"));
      };
      for (int m = 0; m < count && !cancellation->cancelled(); ++m) {
        deliver(Parcel::Kind::kActivation, 0, m, std::move(cut->inputs[m]));
        if (plan.has_targets) deliver(Parcel::Kind::kTarget, last, m, std::move(cut->targets[m]));
      }
    } catch (...) {  // there was no memory; who waits for the step hears of it
      cancellation->Cancel(StatusFromException(std::current_exception()));
    }
    return step;
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

absl::StatusOr<PipelineResult> Pipeline::Finish(PipelineStep::Running& step) {
  const absl::Cleanup forget = [&] { Forget(step.step); };
  const auto who = [&] { return absl::StrCat("pipeline '", options_.name, "'"); };
  try {
    const at::AutoGradMode grad_mode(false);
    PipelineResult result;
    absl::Status ran;
    try {
      ran = step.calls.Wait();
      // The ranks hear of it, too, if that fails: for whoever waits for this, the step has failed.
      if (ran.ok()) ran = Annotate(step.Read(&result), who());
    } catch (...) {  // there was no memory
      ran = StatusFromException(std::current_exception());
    }
    if (!ran.ok()) {
      step.cancellation->Cancel(ran);
      // The cause, where a rank could only say that it was told to end.
      if (const absl::Status before = Before(step.step); !before.ok()) ran = before;
      EndFollowers(step.step, ran);
      return Explain(ran, step);
    }
    absl::MutexLock lock(&mu_);
    untold_.erase(untold_.lower_bound({step.step, 0}),
                  untold_.upper_bound({step.step, std::numeric_limits<int>::max()}));
    return result;
  } catch (...) {
    return Annotate(StatusFromException(std::current_exception()), who());
  }
}

absl::Status Pipeline::Explain(const absl::Status& failure, const PipelineStep::Running& running) {
  const Schedule& schedule = running.schedule;
  const uint64_t step = running.step;
  Deadline until = Deadline::After(kPatience);
  const auto ref_of = [&](int rank) {
    return StepRef{step, FirstStage(schedule.rank_of_stage, rank)};
  };
  std::vector<Future<Message>> states;
  if (absl::IsDeadlineExceeded(failure)) {
    // They have been told that the step is over; who has not heard it cannot answer, either.
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      states.push_back(Ask(kDescribe, rank, EncodeStepRef(ref_of(rank)), until));
    }
  }
  // A stage's own deadline may be what has failed, long before that of the step.
  if (!running.deadline.Passed()) {
    until = std::max(until,
                     running.has_default_deadline ? worker_->DefaultDeadline() : running.deadline);
  }
  // All are asked before any is waited for: one that does not answer takes no time from the others.
  // One that has no step is told, for it may not have been started yet, and keep its stages. One
  // that averages fails its averages, before this step can be taken again.
  // Where a rank averages the call goes on when nobody waits any more: a worker does not serve one
  // that was given up, and a rank that has not heard would average the next step with the other
  // replicas' one after it. Else nobody needs it, and a worker that leaves waits for its calls. A
  // rank on whose way there was no room is asked again, and that call ends with this function. One
  // that neither averages nor steps is not asked again: without an answer it keeps its stages until
  // the context is released, or the next step of this Pipeline begins.
  std::map<int, Future<Message>> ends;
  const std::vector<std::set<int>> stages = StagesThatStep(schedule);
  const Deadline served = std::max(until, Deadline::After(kEndIsServed));
  const auto answer_of = [&](const Future<Message>& end) -> absl::StatusOr<Message> {
    if (end.WaitUntil(until)) return end.Wait();
    return absl::DeadlineExceededError("no answer before the deadline");
  };
  const auto end_of = [&](int rank) {
    return Untold(step, rank).value_or(EncodeEnd({ref_of(rank), 0}));
  };
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const bool averages = Untold(step, rank).has_value();
    Future<Message> end = Ask(kEndStep, rank, end_of(rank), averages ? served : until);
    if (!stages[rank].empty() || averages) ends.emplace(rank, std::move(end));
  }
  const bool has_memory = AskAgainWhereFull(ends, answer_of, [&](int rank) {
    // A call that waits for its answer waits for credit, too.
    return Ask(kEndStep, rank, end_of(rank), until, /*waits=*/true);
  });
  std::vector<std::string> notes;
  if (!has_memory) notes.push_back("no memory to ask a worker again");
  for (size_t rank = 0; rank < states.size(); ++rank) {
    const absl::StatusOr<Message>& answer = states[rank].Wait();
    notes.push_back(absl::StrCat("worker '", options_.workers[rank], "' ",
                                 answer.ok() ? answer->payload : "does not answer"));
  }
  for (const auto& [rank, end] : ends) {
    const absl::StatusOr<Message> answer = answer_of(end);
    const absl::StatusOr<Stepped> stepped =
        answer.ok() ? DecodeStepped(answer->payload) : answer.status();
    if (answer.ok()) {
      absl::MutexLock lock(&mu_);
      untold_.erase({step, rank});
    } else if (Untold(step, rank).has_value()) {
      notes.push_back(absl::StrCat(
          "worker '", options_.workers[rank],
          "' may not have failed its average over the replicas, so that no step may be taken with "
          "its group again (",
          answer.status().message(), ")"));
    }
    for (const int stage : stages[rank]) {
      notes.push_back(absl::StrCat("stage ", stage, " on worker '", options_.workers[rank], "' ",
                                   DescribeStepped(stepped, stage)));
    }
  }
  if (notes.empty()) return failure;
  return Annotate(failure,
                  absl::StrCat("pipeline '", options_.name, "': ", absl::StrJoin(notes, ", ")));
}

std::optional<std::string> Pipeline::Untold(uint64_t step, int rank) const {
  absl::MutexLock lock(&mu_);
  const auto found = untold_.find({step, rank});
  return found == untold_.end() ? std::nullopt : std::optional(found->second);
}

absl::Status Pipeline::TellAgain(Deadline deadline) {
  std::map<std::pair<uint64_t, int>, std::string> untold;  // of steps that have failed
  {
    absl::MutexLock lock(&mu_);
    untold = untold_;
    for (const InFlight& runs : in_flight_) {
      for (auto each = untold.lower_bound({runs.step, 0});
           each != untold.end() && each->first.first == runs.step;) {
        each = untold.erase(each);
      }
    }
  }
  for (const auto& [step_and_rank, end_of_step] : untold) {
    const int rank = step_and_rank.second;
    const Future<Message> end = Ask(kEndStep, rank, end_of_step, deadline, /*waits=*/true);
    const absl::Status& told = end.Wait().status();
    // A worker that has come back has no such step, nor the averager of then. One that has had many
    // steps of others since does not know it any more, and has failed its averages. And one without
    // stages may get others with the same averager.
    const bool is_unknown = absl::IsNotFound(told) || absl::IsFailedPrecondition(told);
    if (!told.ok() && !is_unknown) {
      return Annotate(
          told, absl::StrCat("worker '", options_.workers[rank], "' of pipeline '", options_.name,
                             "' may not have failed its average over the replicas, "
                             "and has not answered that a step has failed"));
    }
    DG_ASSIGN_OR_RETURN(const StepEnd decoded, DecodeEnd(end_of_step));
    absl::MutexLock lock(&mu_);
    if (is_unknown) forgotten_.emplace(decoded.averager, end_of_step);
    untold_.erase(step_and_rank);
  }
  return absl::OkStatus();
}

absl::Status Pipeline::CheckOneEach(const std::vector<uint64_t>& averagers) const {
  std::map<uint64_t, int> rank_of;
  for (int rank = 0; rank < static_cast<int>(averagers.size()); ++rank) {
    if (averagers[rank] == 0) continue;
    const auto [first, is_new] = rank_of.emplace(averagers[rank], rank);
    if (is_new) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "pipeline '", options_.name, "': workers '", options_.workers[first->second], "' and '",
        options_.workers[rank],
        "' average over replicas with one averager (PipelineStagesOptions::averager; in C "
        "dg_pipeline_stages_options.averager), and their averages would come in another order in "
        "each replica: give each "
        "worker one of its own"));
  }
  return absl::OkStatus();
}

absl::Status Pipeline::CheckAverager(int rank, uint64_t averager, Deadline deadline) const {
  std::string end_of_step;
  {
    absl::MutexLock lock(&mu_);
    const auto forgotten = forgotten_.find(averager);
    if (forgotten == forgotten_.end()) return absl::OkStatus();
    end_of_step = forgotten->second;
  }
  // The other replicas hear by it that its averages have failed.
  Ask(kEndStep, rank, end_of_step, deadline, /*waits=*/true).Wait().status().IgnoreError();
  return absl::FailedPreconditionError(absl::StrCat(
      "worker '", options_.workers[rank], "' of pipeline '", options_.name,
      "' may not have failed its average over the replicas, and still has the averager that it had "
      "in a step which has failed"));
}

void Pipeline::GiveBack(const Schedule& schedule, uint64_t step,
                        const std::vector<int>& ranks) const {
  const Deadline until = Deadline::After(kPatience);
  std::vector<Future<Message>> ends;
  for (const int rank : ranks) {
    try {
      const StepEnd end{{step, FirstStage(schedule.rank_of_stage, rank)}, 0};
      ends.push_back(Ask(kEndStep, rank, EncodeEnd(end), until));
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): as where there is no room
    }
  }
  for (const Future<Message>& end : ends) end.Wait().status().IgnoreError();
}

Future<Message> Pipeline::Ask(absl::string_view function, int rank, std::string payload,
                              Deadline deadline, bool waits) const {
  const std::string name = absl::StrCat(function, options_.name);
  Message message = {std::move(payload), {}};
  const CallOptions options = {.deadline = deadline};
  if (!waits) {
    return worker_->CallAsync(options_.workers[rank], name, std::move(message), options);
  }
  return Future<Message>::Of(
      worker_->Call(options_.workers[rank], name, std::move(message), options));
}

}  // namespace distgrad
