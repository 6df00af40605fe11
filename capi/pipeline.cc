// Pipelines: schedules, stages whose functions are C's, and the steps over them.
#include "core/pipeline/pipeline.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "capi/averager_object.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "capi/worker_object.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stage_span.h"
#include "core/pipeline/stages.h"
#include "core/tensor/exception.h"

namespace distgrad {
namespace {

using Tensors = std::vector<at::Tensor>;

// How long dg_pipeline_stages_destroy waits, as its comment says.
constexpr absl::Duration kDestroyTimeout = absl::Minutes(1);

absl::StatusOr<int> ToInt(uint64_t number, absl::string_view what) {
  if (number <= static_cast<uint64_t>(std::numeric_limits<int>::max())) {
    return static_cast<int>(number);
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " is ", number, ", which is too large"));
}

// ------------------------------------------------------------------------------------ Schedules

struct ScheduleObject : HandleObject {
  using Handle = dg_schedule;
  static constexpr HandleKind kKind = HandleKind::kSchedule;
  static constexpr char kName[] = "dg_schedule";

  explicit ScheduleObject(Schedule of) : schedule(std::move(of)) {
    for (const int rank : schedule.rank_of_stage) ranks.push_back(static_cast<uint32_t>(rank));
    for (const int most : schedule.max_activations) activations.push_back(most);
    for (const std::vector<Action>& list : schedule.lists) {
      std::vector<dg_action>& copy = actions.emplace_back();
      for (const Action& action : list) copy.push_back(FromAction(action));
    }
    for (const std::vector<dg_action>& list : actions) lists.push_back({list.data(), list.size()});
    data.struct_size = sizeof(data);
    data.micro_batches = static_cast<uint64_t>(schedule.micro_batches);
    data.rank_of_stage = ranks.data();
    data.stage_count = ranks.size();
    data.lists = lists.data();
    data.rank_count = lists.size();
    data.max_activations = activations.empty() ? nullptr : activations.data();
  }

  static dg_action FromAction(const Action& action) {
    return {static_cast<uint32_t>(action.kind), static_cast<uint32_t>(action.stage),
            static_cast<uint32_t>(action.micro_batch)};
  }

  // Constant after construction.
  const Schedule schedule;  // that Check() has accepted
  // The same for C.
  std::vector<uint32_t> ranks, activations;
  std::vector<std::vector<dg_action>> actions;
  std::vector<dg_action_list> lists;
  dg_schedule_data data = DG_SCHEDULE_DATA_INIT;
};

// What DG_ACTION_... is taken to be.
static_assert(DG_ACTION_FORWARD == int{static_cast<uint8_t>(Action::Kind::kForward)} &&
              DG_ACTION_BACKWARD_WEIGHT ==
                  int{static_cast<uint8_t>(Action::Kind::kBackwardWeight)} &&
              DG_ACTION_RECEIVE_GRADIENT ==
                  int{static_cast<uint8_t>(Action::Kind::kReceiveGradient)} &&
              DG_ACTION_STEP == int{static_cast<uint8_t>(Action::Kind::kStep)} &&
              DG_ACTION_STEP + 1 == Action::kKinds);

absl::StatusOr<std::vector<Action>> ToActions(const dg_action_list& list) {
  DG_RETURN_IF_ERROR(CheckArray(list.data, list.size, "the data of a dg_action_list"));
  std::vector<Action> actions;
  actions.reserve(list.size);
  for (size_t i = 0; i < list.size; ++i) {
    const dg_action& action = list.data[i];
    if (action.kind >= uint32_t{Action::kKinds}) {
      return absl::InvalidArgumentError(
          absl::StrCat("action ", i, " is of an unknown kind, ", action.kind));
    }
    DG_ASSIGN_OR_RETURN(const int stage, ToInt(action.stage, "the stage of an action"));
    DG_ASSIGN_OR_RETURN(const int micro_batch,
                        ToInt(action.micro_batch, "the micro-batch of an action"));
    actions.push_back({static_cast<Action::Kind>(action.kind), stage, micro_batch});
  }
  return actions;
}

absl::StatusOr<Schedule> ToSchedule(const dg_schedule_data& data) {
  DG_RETURN_IF_ERROR(CheckArray(data.rank_of_stage, data.stage_count, "rank_of_stage"));
  DG_RETURN_IF_ERROR(CheckArray(data.lists, data.rank_count, "lists"));
  Schedule schedule;
  DG_ASSIGN_OR_RETURN(schedule.micro_batches, ToInt(data.micro_batches, "micro_batches"));
  for (size_t s = 0; s < data.stage_count; ++s) {
    DG_ASSIGN_OR_RETURN(const int rank,
                        ToInt(data.rank_of_stage[s], absl::StrCat("the rank of stage ", s)));
    schedule.rank_of_stage.push_back(rank);
  }
  for (size_t rank = 0; rank < data.rank_count; ++rank) {
    absl::StatusOr<std::vector<Action>> list = ToActions(data.lists[rank]);
    if (!list.ok()) return Annotate(list.status(), absl::StrCat("the list of rank ", rank));
    schedule.lists.push_back(*std::move(list));
    if (data.max_activations == nullptr) continue;
    DG_ASSIGN_OR_RETURN(const int most, ToInt(data.max_activations[rank], "max_activations"));
    schedule.max_activations.push_back(most);
  }
  return schedule;
}

absl::Status GiveSchedule(absl::StatusOr<Schedule> schedule, dg_schedule** out) {
  DG_RETURN_IF_ERROR(schedule.status());
  *out = NewHandle<ScheduleObject>(*std::move(schedule));
  return absl::OkStatus();
}

// `make` takes numbers of stages and micro-batches.
template <typename F>
dg_error* CreateSchedule(F make, uint64_t stages, uint64_t micro_batches,
                         dg_schedule** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const int stage_count, ToInt(stages, "the number of stages"));
    DG_ASSIGN_OR_RETURN(const int count, ToInt(micro_batches, "the number of micro-batches"));
    return GiveSchedule(make(stage_count, count), out);
  });
}

// --------------------------------------------------------------------------------------- Stages

// The functions of a stage, with their user data.
struct StageFunctions {
  dg_pipeline_stage stage;
  UserData user_data;
};

// Tensors for a function to borrow.
class LentTensors {
 public:
  explicit LentTensors(const Tensors& tensors) : handles_(NewTensorHandles(tensors)) {
    for (const auto& handle : handles_) pointers_.push_back(handle.get());
  }
  const dg_tensor* const* data() const { return pointers_.data(); }
  size_t size() const { return pointers_.size(); }

 private:
  std::vector<OwnedHandle<TensorObject>> handles_;
  std::vector<const dg_tensor*> pointers_;
};

// A context for a function to borrow.
class LentContext : public ContextObject {
 public:
  LentContext(const Context& context, absl::Notification* ended)
      : ContextObject(const_cast<Context*>(&context)), ended_(ended) {}
  ~LentContext() override { ended_->Notify(); }

 private:
  absl::Notification* const ended_;
};

dg_micro_batch EmptyMicroBatch(const dg_pipeline_stage& stage) {
  dg_micro_batch micro_batch = {};
  micro_batch.struct_size = sizeof(micro_batch);
  micro_batch.stage = stage.number;
  return micro_batch;
}

// The stages that dg_pipeline_stages_create has made. Their functions live here: others keep them
// while one of them runs.
class StagesPart : public SharedWorker::Part {
 public:
  static absl::StatusOr<std::shared_ptr<StagesPart>> Create(
      const SharedWorker::Use& worker, std::string name,
      std::vector<std::shared_ptr<const StageFunctions>> functions, PipelineStagesOptions options) {
    std::shared_ptr<StagesPart> made(
        new StagesPart(worker.shared().shared_from_this(), name, functions));
    std::map<int, PipelineStage> stages;
    for (const std::shared_ptr<const StageFunctions>& each : functions) {
      DG_ASSIGN_OR_RETURN(const int number, ToInt(each->stage.number, "the number of a stage"));
      if (stages.count(number) > 0) {
        return absl::InvalidArgumentError(absl::StrCat("there are two stages ", number));
      }
      DG_ASSIGN_OR_RETURN(stages[number], made->ToStage(each));
      made->by_stage_.emplace(number, each);
    }
    options.on_action = [part = made.get()](const StageSpan& span) { part->OnAction(span); };
    made->averager_ = options.averager;
    DG_ASSIGN_OR_RETURN(made->stages_, PipelineStages::Create(worker.get(), std::move(name),
                                                              std::move(stages), options));
    return made;
  }
  // They may be the last that have the averager, and that the last that has the group.
  ~StagesPart() override {
    stages_ = nullptr;
    EndWherePossible(std::move(averager_));
  }

  bool Close(Deadline deadline) override {
    const bool idle = stages_->Close(deadline);
    std::vector<std::shared_ptr<const StageFunctions>> functions;  // end outside the lock
    absl::MutexLock lock(&mu_);
    functions.swap(functions_);
    return idle;
  }
  std::string Describe() const override { return absl::StrCat("stages of pipeline '", name_, "'"); }

  // Whether this thread runs one of the functions, which Close() would wait for.
  bool RunsHere() const { return Serving().stages == this; }
  const std::string& pipeline() const { return name_; }

 private:
  StagesPart(const std::shared_ptr<SharedWorker>& worker, std::string name,
             std::vector<std::shared_ptr<const StageFunctions>> functions)
      : worker_(worker.get()), name_(std::move(name)), functions_(std::move(functions)) {}

  absl::StatusOr<PipelineStage> ToStage(const std::shared_ptr<const StageFunctions>& functions) {
    const dg_pipeline_stage& stage = functions->stage;
    PipelineStage made;
    DG_ASSIGN_OR_RETURN(made.inputs, ToCount(stage.inputs, "inputs"));
    DG_ASSIGN_OR_RETURN(made.targets, ToCount(stage.targets, "targets"));
    made.recompute = (stage.flags & DG_PIPELINE_STAGE_RECOMPUTE) != 0;
    DG_RETURN_IF_ERROR(CheckArray(stage.tied_names, stage.tied_count, "tied_names"));
    DG_RETURN_IF_ERROR(CheckArray(stage.tied, stage.tied_count, "tied"));
    for (size_t i = 0; i < stage.tied_count; ++i) {
      DG_ASSIGN_OR_RETURN(const std::string name,
                          FromStr(stage.tied_names[i], "a name of tied_names"));
      DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned,
                          PinElement<TensorObject>(stage.tied, i, "tied"));
      if (!made.tied.emplace(name, pinned->tensor).second) {
        return absl::InvalidArgumentError(absl::StrCat("tied_names has '", name, "' twice"));
      }
    }
    DG_RETURN_IF_ERROR(CheckArray(stage.skips, stage.skip_count, "skips"));
    for (size_t i = 0; i < stage.skip_count; ++i) {
      DG_ASSIGN_OR_RETURN(const int to, ToInt(stage.skips[i], "a stage of skips"));
      made.skips.push_back(to);
    }
    const std::weak_ptr<const StageFunctions> weak = functions;
    if (stage.forward != nullptr) {
      made.forward = [this, weak](Tensors inputs) {
        return ValueOrThrow(Forward(*Lock(weak), inputs));
      };
    }
    if (stage.loss != nullptr) {
      made.loss = [this, weak](Tensors outputs, Tensors targets) {
        return ValueOrThrow(Loss(*Lock(weak), outputs, targets));
      };
    }
    if (stage.step != nullptr) {
      made.step = [this, weak](const Context& context) { return Step(*Lock(weak), context); };
    }
    return made;
  }

  static absl::StatusOr<std::optional<int>> ToCount(int64_t count, absl::string_view what) {
    if (count == DG_ANY_COUNT) return std::nullopt;
    if (count >= 0 && count <= std::numeric_limits<int>::max()) return static_cast<int>(count);
    return absl::InvalidArgumentError(
        absl::StrCat("a stage takes ", count, " ", what, "; DG_ANY_COUNT is ", DG_ANY_COUNT));
  }

  std::shared_ptr<const StageFunctions> Lock(
      const std::weak_ptr<const StageFunctions>& weak) const {
    std::shared_ptr<const StageFunctions> alive = weak.lock();
    if (alive == nullptr) throw StatusError(absl::CancelledError("the stages were taken off"));
    return alive;
  }

  // Calls a function of the user's. What it does to the thread's gradient mode is undone.
  template <typename F>
  absl::Status Call(F&& function) const {
    const ServingScope scope({.worker = worker_, .stages = this});
    const at::AutoGradMode as_it_was(at::GradMode::is_enabled());
    return TakeError(function());
  }

  absl::StatusOr<Tensors> Forward(const StageFunctions& functions, const Tensors& inputs) const {
    const LentTensors lent(inputs);
    dg_micro_batch micro_batch = EmptyMicroBatch(functions.stage);
    micro_batch.inputs = lent.data();
    micro_batch.input_count = lent.size();
    dg_message* outputs = nullptr;
    const absl::Status status = Call(
        [&] { return functions.stage.forward(functions.user_data.get(), &micro_batch, &outputs); });
    const OwnedHandle<MessageObject> owner(outputs);
    DG_RETURN_IF_ERROR(status);
    absl::StatusOr<std::unique_ptr<MessageObject>> taken =
        TakeHandle<MessageObject>(outputs, "*outputs");
    if (!taken.ok()) return absl::InternalError(taken.status().message());
    if (!(*taken)->message.payload.empty()) {
      return absl::InvalidArgumentError(
          "its outputs are a message with a payload, which nobody would get");
    }
    return std::move((*taken)->message.tensors);
  }

  absl::StatusOr<at::Tensor> Loss(const StageFunctions& functions, const Tensors& outputs,
                                  const Tensors& targets) const {
    const LentTensors of_forward(outputs), of_batch(targets);
    dg_micro_batch micro_batch = EmptyMicroBatch(functions.stage);
    micro_batch.outputs = of_forward.data();
    micro_batch.output_count = of_forward.size();
    micro_batch.targets = of_batch.data();
    micro_batch.target_count = of_batch.size();
    dg_tensor* loss = nullptr;
    const absl::Status status =
        Call([&] { return functions.stage.loss(functions.user_data.get(), &micro_batch, &loss); });
    const OwnedHandle<TensorObject> owner(loss);
    DG_RETURN_IF_ERROR(status);
    absl::StatusOr<std::unique_ptr<TensorObject>> taken = TakeHandle<TensorObject>(loss, "*loss");
    if (!taken.ok()) return absl::InternalError(taken.status().message());
    return (*taken)->tensor;
  }

  absl::Status Step(const StageFunctions& functions, const Context& context) const {
    absl::Notification ended;
    absl::Status status;
    {
      const auto lent = NewOwnedHandle<LentContext>(context, &ended);
      status = Call([&] { return functions.stage.step(functions.user_data.get(), lent.get()); });
    }
    ended.WaitForNotification();  // of other threads that still are in a function with it
    return status;
  }

  // Of each action, after it.
  void OnAction(const StageSpan& span) const {
    worker_->trace().Record(span);
    const std::shared_ptr<const StageFunctions> functions = by_stage_.at(span.action.stage).lock();
    if (functions == nullptr || functions->stage.on_action == nullptr) return;
    const dg_action action = ScheduleObject::FromAction(span.action);
    dg_stage_span told = {};
    told.struct_size = sizeof(told);
    told.rank = static_cast<uint64_t>(span.rank);
    told.step = span.step;
    told.action = &action;
    told.begin_ns = absl::ToUnixNanos(span.begin);
    told.end_ns = absl::ToUnixNanos(span.end);
    const absl::Status status =
        Call([&] { return functions->stage.on_action(functions->user_data.get(), &told); });
    if (!status.ok()) throw StatusError(status);
  }

  // Constant once it is made.
  SharedWorker* const worker_;  // alive while a function runs
  std::map<int, std::weak_ptr<const StageFunctions>> by_stage_;
  const std::string name_;
  std::unique_ptr<PipelineStages> stages_;
  std::shared_ptr<GradientAverager> averager_;  // that of stages_

  absl::Mutex mu_;
  std::vector<std::shared_ptr<const StageFunctions>> functions_ ABSL_GUARDED_BY(mu_);
};

// The stages of which this thread runs a function, or null.
const StagesPart* Running() {
  return static_cast<const StagesPart*>(Serving().stages);  // no other class is put there
}

struct PipelineStagesObject : HandleObject {
  using Handle = dg_pipeline_stages;
  static constexpr HandleKind kKind = HandleKind::kPipelineStages;
  static constexpr char kName[] = "dg_pipeline_stages";

  PipelineStagesObject(std::shared_ptr<SharedWorker> worker, std::shared_ptr<StagesPart> part)
      : worker(std::move(worker)), part(std::move(part)) {}
  const std::shared_ptr<SharedWorker> worker;
  const std::shared_ptr<StagesPart> part;
};

// The user data of a stage, where its struct is large enough to have some.
UserData TakeUserData(const dg_pipeline_stage* stage) {
  constexpr size_t kEnd = offsetof(dg_pipeline_stage, destroy) + sizeof(dg_pipeline_stage::destroy);
  if (stage == nullptr || stage->struct_size < kEnd) return UserData(nullptr, nullptr);
  return UserData(stage->user_data, stage->destroy);
}

// Takes the user data of all that have some, also on an error, and where there is no memory.
absl::StatusOr<std::vector<std::shared_ptr<const StageFunctions>>> TakeStages(
    const dg_pipeline_stage* const* stages, size_t count) {
  DG_RETURN_IF_ERROR(CheckArray(stages, count, "stages"));
  std::vector<std::shared_ptr<const StageFunctions>> taken;
  absl::Status first;
  size_t i = 0;
  const absl::Cleanup rest = [&] {
    while (++i < count) TakeUserData(stages[i]);
  };
  for (; i < count; ++i) {
    UserData user_data = TakeUserData(stages[i]);
    if (stages[i] == nullptr) {
      first.Update(absl::InvalidArgumentError(absl::StrCat("stages[", i, "] is NULL")));
      continue;
    }
    const absl::StatusOr<dg_pipeline_stage> read =
        ReadOptions<dg_pipeline_stage>(stages[i], DG_PIPELINE_STAGE_INIT, "dg_pipeline_stage");
    first.Update(
        read.ok() ? CheckFlags(read->flags, DG_PIPELINE_STAGE_RECOMPUTE, "dg_pipeline_stage.flags")
                  : read.status());
    if (!first.ok()) continue;
    taken.push_back(
        std::make_shared<const StageFunctions>(StageFunctions{*read, std::move(user_data)}));
  }
  if (!first.ok()) return first;
  return taken;
}

// ------------------------------------------------------------------------------------ Pipelines

struct PipelineObject : HandleObject {
  using Handle = dg_pipeline;
  static constexpr HandleKind kKind = HandleKind::kPipeline;
  static constexpr char kName[] = "dg_pipeline";

  PipelineObject(std::shared_ptr<SharedWorker> worker, std::unique_ptr<Pipeline> pipeline)
      : worker(std::move(worker)), pipeline(std::move(pipeline)) {}
  const std::shared_ptr<SharedWorker> worker;
  // Steps that run keep it. Not used once the worker is gone.
  const std::shared_ptr<Pipeline> pipeline;
};

// A step of dg_pipeline_start, which ends with the worker at the latest. Once it has begun it needs
// nothing of the handle of its context. Thread-safe.
class StepInFlight : public EndsWithWorker {
 public:
  explicit StepInFlight(std::shared_ptr<Pipeline> pipeline) : pipeline_(std::move(pipeline)) {}

  void Begin(PipelineStep step) {
    absl::MutexLock lock(&mu_);
    step_ = std::move(step);
  }
  bool valid() const {
    absl::MutexLock lock(&mu_);
    return step_.valid();
  }
  // Takes the step from this, which is not valid from then on: so one thread waits for its end.
  PipelineStep Take() {
    absl::MutexLock lock(&mu_);
    return std::move(step_);
  }
  // Waits as PipelineStep's destructor does.
  void End() override { const PipelineStep last = Take(); }

  // Returns kFailedPrecondition in a function of a stage of its pipeline, for which it may wait. In
  // those of others one may wait for it.
  absl::Status CheckIsNotWithin() const {
    const StagesPart* const running = Running();
    if (running == nullptr || running->pipeline() != pipeline_->name()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("this waits for a step of pipeline '", pipeline_->name(),
                     "', in a function of one of its stages, for which the step may wait"));
  }

 private:
  const std::shared_ptr<Pipeline> pipeline_;  // outlives the step

  mutable absl::Mutex mu_;
  PipelineStep step_ ABSL_GUARDED_BY(mu_);
};

struct PipelineStepObject : HandleObject {
  using Handle = dg_pipeline_step;
  static constexpr HandleKind kKind = HandleKind::kPipelineStep;
  static constexpr char kName[] = "dg_pipeline_step";

  PipelineStepObject(std::shared_ptr<SharedWorker> worker, std::shared_ptr<StepInFlight> step)
      : worker(std::move(worker)), step(std::move(step)) {}
  const std::shared_ptr<SharedWorker> worker;
  const std::shared_ptr<StepInFlight> step;
};

// Ends a step that nobody has waited for. Where this thread must not wait, another one does.
void EndStep(SharedWorker& worker, const std::shared_ptr<StepInFlight>& step) {
  if (!step->valid()) return;
  // In a function of a stage the step may wait for that function.
  const bool waits = MayWait() && Running() == nullptr;
  absl::StatusOr<SharedWorker::Use> use = waits ? worker.Begin() : worker.BeginInBackground();
  if (!use.ok()) return;  // the worker's end ends the step
  if (waits) {
    const BlockingScope blocking;
    step->End();
    worker.Detach(step);
    return;
  }
  const absl::Status ended = EndInBackground([step, kept = *std::move(use)] {
    step->End();
    kept.shared().Detach(step);
  });
  if (ended.ok()) return;
  DG_LOG(ERROR)
      << "a dg_pipeline_step cannot be destroyed in the background, and ends with worker '"
      << worker.name() << "': " << ended.message();
}

struct PipelineResultObject : HandleObject {
  using Handle = dg_pipeline_result;
  static constexpr HandleKind kKind = HandleKind::kPipelineResult;
  static constexpr char kName[] = "dg_pipeline_result";

  PipelineResult result;  // constant once there is one
};

struct Batch {
  Tensors inputs, targets;
  Deadline deadline;
};

// What a step of training is given, pinned for as long as it is begun.
struct Training {
  Pinned<PipelineObject> pipeline;
  Pinned<ContextObject> context;
  Batch batch;
  SharedWorker::Use use;
};

absl::StatusOr<Batch> ToBatch(const dg_tensor* const* inputs, size_t input_count,
                              const dg_tensor* const* targets, size_t target_count,
                              const dg_pipeline_run_options* options) {
  DG_ASSIGN_OR_RETURN(const dg_pipeline_run_options read,
                      ReadOptions<dg_pipeline_run_options>(options, DG_PIPELINE_RUN_OPTIONS_INIT,
                                                           "dg_pipeline_run_options"));
  Batch batch{{}, {}, ToDeadline(read.timeout_ms, absl::InfinitePast())};
  DG_ASSIGN_OR_RETURN(batch.inputs,
                      PinTensors(inputs, input_count, /*allow_null=*/false, "inputs"));
  DG_ASSIGN_OR_RETURN(batch.targets,
                      PinTensors(targets, target_count, /*allow_null=*/false, "targets"));
  return batch;
}

absl::StatusOr<Training> BeginTraining(const dg_pipeline* pipeline, const dg_context* context,
                                       const dg_tensor* const* inputs, size_t input_count,
                                       const dg_tensor* const* targets, size_t target_count,
                                       const dg_pipeline_run_options* options) {
  DG_RETURN_IF_ERROR(CheckMayWait());
  DG_ASSIGN_OR_RETURN(Pinned<PipelineObject> pinned, Pin<PipelineObject>(pipeline, "pipeline"));
  DG_ASSIGN_OR_RETURN(Pinned<ContextObject> of, Pin<ContextObject>(context, "context"));
  DG_ASSIGN_OR_RETURN(Batch batch, ToBatch(inputs, input_count, targets, target_count, options));
  DG_ASSIGN_OR_RETURN(SharedWorker::Use use, pinned->worker->Begin());
  return Training{std::move(pinned), std::move(of), std::move(batch), std::move(use)};
}

}  // namespace
}  // namespace distgrad

using namespace distgrad;

extern "C" {

// ------------------------------------------------------------------------------------ Schedules

dg_error* dg_schedule_create(const dg_schedule_data* data, uint64_t flags,
                             dg_schedule** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(
        CheckFlags(flags, DG_SCHEDULE_ADD_TRANSFERS | DG_SCHEDULE_ADD_STEPS, "flags"));
    DG_ASSIGN_OR_RETURN(
        const dg_schedule_data read,
        ReadOptions<dg_schedule_data>(data, DG_SCHEDULE_DATA_INIT, "dg_schedule_data"));
    DG_ASSIGN_OR_RETURN(Schedule schedule, ToSchedule(read));
    if ((flags & DG_SCHEDULE_ADD_TRANSFERS) != 0) AddTransfers(&schedule);
    if ((flags & DG_SCHEDULE_ADD_STEPS) != 0) schedule = WithSteps(std::move(schedule));
    DG_RETURN_IF_ERROR(Check(schedule));
    return GiveSchedule(std::move(schedule), out);
  });
}

dg_error* dg_schedule_create_gpipe(uint64_t stages, uint64_t micro_batches,
                                   dg_schedule** out) noexcept {
  return CreateSchedule(GPipe, stages, micro_batches, out);
}

dg_error* dg_schedule_create_one_forward_one_backward(uint64_t stages, uint64_t micro_batches,
                                                      dg_schedule** out) noexcept {
  return CreateSchedule(OneForwardOneBackward, stages, micro_batches, out);
}

dg_error* dg_schedule_create_interleaved_one_forward_one_backward(uint64_t ranks,
                                                                  uint64_t stages_per_rank,
                                                                  uint64_t micro_batches,
                                                                  dg_schedule** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const int rank_count, ToInt(ranks, "the number of ranks"));
    DG_ASSIGN_OR_RETURN(const int each, ToInt(stages_per_rank, "the number of stages of a rank"));
    DG_ASSIGN_OR_RETURN(const int count, ToInt(micro_batches, "the number of micro-batches"));
    return GiveSchedule(InterleavedOneForwardOneBackward(rank_count, each, count), out);
  });
}

dg_error* dg_schedule_create_zero_bubble_h1(uint64_t stages, uint64_t micro_batches,
                                            dg_schedule** out) noexcept {
  return CreateSchedule(ZeroBubbleH1, stages, micro_batches, out);
}

dg_error* dg_schedule_create_zero_bubble_h2(uint64_t stages, uint64_t micro_batches,
                                            dg_schedule** out) noexcept {
  return CreateSchedule(ZeroBubbleH2, stages, micro_batches, out);
}

dg_error* dg_schedule_create_zero_bubble(uint64_t stages, uint64_t micro_batches,
                                         uint64_t forwards_ahead, dg_schedule** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const int stage_count, ToInt(stages, "the number of stages"));
    DG_ASSIGN_OR_RETURN(const int count, ToInt(micro_batches, "the number of micro-batches"));
    DG_ASSIGN_OR_RETURN(const int ahead, ToInt(forwards_ahead, "the number of forwards ahead"));
    return GiveSchedule(ZeroBubble(stage_count, count, ahead), out);
  });
}

const dg_schedule_data* dg_schedule_get(const dg_schedule* schedule) noexcept {
  return GuardValue<const dg_schedule_data*>(nullptr, [&]() -> const dg_schedule_data* {
    const absl::StatusOr<Pinned<ScheduleObject>> pinned = Pin<ScheduleObject>(schedule, "schedule");
    return pinned.ok() ? &(*pinned)->data : nullptr;
  });
}

dg_error* dg_schedule_simulate(const dg_schedule* schedule,
                               double (*time)(void* user_data, const dg_action* action),
                               void* user_data, double* end, double* busy,
                               uint32_t* max_activations, double* const* starts) noexcept {
  return Guard([&]() -> absl::Status {
    if (time == nullptr) return absl::InvalidArgumentError("time is NULL");
    DG_ASSIGN_OR_RETURN(const Pinned<ScheduleObject> pinned,
                        Pin<ScheduleObject>(schedule, "schedule"));
    const auto ask = [&](const Action& action) {
      const dg_action borrowed = ScheduleObject::FromAction(action);
      return time(user_data, &borrowed);
    };
    DG_ASSIGN_OR_RETURN(const Timeline timeline, Simulate(pinned->schedule, ask));
    if (end != nullptr) *end = timeline.end;
    if (busy != nullptr) std::copy(timeline.busy.begin(), timeline.busy.end(), busy);
    if (max_activations != nullptr) {
      std::copy(timeline.max_activations.begin(), timeline.max_activations.end(), max_activations);
    }
    for (size_t rank = 0; starts != nullptr && rank < timeline.starts.size(); ++rank) {
      if (starts[rank] == nullptr) continue;
      std::copy(timeline.starts[rank].begin(), timeline.starts[rank].end(), starts[rank]);
    }
    return absl::OkStatus();
  });
}

void dg_schedule_destroy(dg_schedule* schedule) noexcept {
  DestroyHandle<ScheduleObject>(schedule);
}

// --------------------------------------------------------------------------------------- Stages

dg_error* dg_pipeline_stages_create(dg_worker* worker, dg_str name,
                                    const dg_pipeline_stage* const* stages, size_t stage_count,
                                    const dg_pipeline_stages_options* options,
                                    dg_pipeline_stages** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(std::vector<std::shared_ptr<const StageFunctions>> functions,
                        TakeStages(stages, stage_count));
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(
        const dg_pipeline_stages_options read,
        ReadOptions<dg_pipeline_stages_options>(options, DG_PIPELINE_STAGES_OPTIONS_INIT,
                                                "dg_pipeline_stages_options"));
    PipelineStagesOptions core_options;
    DG_ASSIGN_OR_RETURN(core_options.num_threads, ToInt(read.num_threads, "num_threads"));
    if (read.averager != nullptr) {
      DG_ASSIGN_OR_RETURN(
          const Pinned<AveragerObject> pinned,
          Pin<AveragerObject>(read.averager, "dg_pipeline_stages_options.averager"));
      core_options.averager = pinned->averager;
    }
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_ASSIGN_OR_RETURN(std::string text, FromStr(name, "name"));
    DG_ASSIGN_OR_RETURN(
        std::shared_ptr<StagesPart> part,
        StagesPart::Create(use, std::move(text), std::move(functions), core_options));
    auto made = NewOwnedHandle<PipelineStagesObject>(use.shared().shared_from_this(), part);
    DG_RETURN_IF_ERROR(use.shared().Attach(std::move(part)));
    *out = made.release();
    return absl::OkStatus();
  });
}

void dg_pipeline_stages_destroy(dg_pipeline_stages* stages) noexcept {
  if (stages == nullptr) return;
  GuardValue(0, [&] {
    const absl::StatusOr<Pinned<PipelineStagesObject>> pinned =
        Pin<PipelineStagesObject>(stages, "stages");
    // Of several that destroy it one does all of it.
    if (!pinned.ok() || !DestroyHandle<PipelineStagesObject>(stages)) return 0;
    StagesPart& part = *(*pinned)->part;
    const bool waits = MayWait() && !part.RunsHere();
    const BlockingScope blocking;
    if (part.Close(Deadline::After(waits ? kDestroyTimeout : absl::ZeroDuration()))) {
      (*pinned)->worker->Detach(&part);
    } else if (waits) {
      DG_LOG(ERROR) << "a function of " << part.Describe() << " still runs after "
                    << absl::FormatDuration(kDestroyTimeout)
                    << "; dg_pipeline_stages_destroy waits no longer, and its thread is freed with "
                    << "worker '" << (*pinned)->worker->name() << "'";
    }
    return 0;
  });
}

// ------------------------------------------------------------------------------------ Pipelines

dg_error* dg_pipeline_create(dg_worker* worker, dg_str name, const dg_schedule* schedule,
                             const dg_str* workers, size_t worker_count,
                             const dg_pipeline_options* options, dg_pipeline** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(
        const dg_pipeline_options read,
        ReadOptions<dg_pipeline_options>(options, DG_PIPELINE_OPTIONS_INIT, "dg_pipeline_options"));
    PipelineOptions core_options;
    if (read.reduction > DG_REDUCTION_SUM) {
      return absl::InvalidArgumentError(
          absl::StrCat("reduction is ", read.reduction, ", which is none of DG_REDUCTION_..."));
    }
    core_options.reduction = read.reduction == DG_REDUCTION_SUM ? PipelineOptions::Reduction::kSum
                                                                : PipelineOptions::Reduction::kMean;
    DG_ASSIGN_OR_RETURN(core_options.name, FromStr(name, "name"));
    DG_ASSIGN_OR_RETURN(core_options.workers, FromStrs(workers, worker_count, "workers"));
    {
      DG_ASSIGN_OR_RETURN(const Pinned<ScheduleObject> pinned,
                          Pin<ScheduleObject>(schedule, "schedule"));
      core_options.schedule = pinned->schedule;
    }
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, UseWorker(worker));
    DG_ASSIGN_OR_RETURN(std::unique_ptr<Pipeline> pipeline,
                        Pipeline::Create(use.get(), std::move(core_options)));
    *out = NewHandle<PipelineObject>(use.shared().shared_from_this(), std::move(pipeline));
    return absl::OkStatus();
  });
}

void dg_pipeline_destroy(dg_pipeline* pipeline) noexcept {
  DestroyHandle<PipelineObject>(pipeline);
}

dg_error* dg_pipeline_train(const dg_pipeline* pipeline, const dg_context* context,
                            const dg_tensor* const* inputs, size_t input_count,
                            const dg_tensor* const* targets, size_t target_count,
                            const dg_pipeline_run_options* options,
                            dg_pipeline_result** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(Training given, BeginTraining(pipeline, context, inputs, input_count,
                                                      targets, target_count, options));
    // Made before, for after a step that was taken nobody may hear that there is no memory.
    HandleAhead<PipelineResultObject> made;
    Batch& batch = given.batch;
    DG_ASSIGN_OR_RETURN(made->result, given.pipeline->pipeline->Train(
                                          given.context->context, std::move(batch.inputs),
                                          std::move(batch.targets), batch.deadline));
    *out = made.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_pipeline_start(const dg_pipeline* pipeline, const dg_context* context,
                            const dg_tensor* const* inputs, size_t input_count,
                            const dg_tensor* const* targets, size_t target_count,
                            const dg_pipeline_run_options* options,
                            dg_pipeline_step** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(Training given, BeginTraining(pipeline, context, inputs, input_count,
                                                      targets, target_count, options));
    const PipelineObject& object = *given.pipeline;
    Batch& batch = given.batch;
    // Both before the step runs, for there may be no memory for them.
    const auto step = std::make_shared<StepInFlight>(object.pipeline);
    HandleAhead<PipelineStepObject> made(object.worker, step);
    given.use.shared().Attach(step);
    absl::Cleanup detach = [&] { given.use.shared().Detach(step); };
    DG_ASSIGN_OR_RETURN(PipelineStep started,
                        object.pipeline->Start(given.context->context, std::move(batch.inputs),
                                               std::move(batch.targets), batch.deadline));
    step->Begin(std::move(started));
    std::move(detach).Cancel();
    *out = made.Release();
    return absl::OkStatus();
  });
}

dg_error* dg_pipeline_step_wait(dg_pipeline_step* step, dg_pipeline_result** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<PipelineStepObject> pinned,
                        Pin<PipelineStepObject>(step, "step"));
    DG_RETURN_IF_ERROR(pinned->step->CheckIsNotWithin());  // before it is taken from who may wait
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, pinned->worker->Begin());
    // Made before, for after a step that was taken nobody may hear that there is no memory.
    HandleAhead<PipelineResultObject> made;
    PipelineStep taken = pinned->step->Take();
    if (!taken.valid()) {
      return absl::FailedPreconditionError("somebody has waited for this dg_pipeline_step already");
    }
    use.shared().Detach(pinned->step);
    DG_ASSIGN_OR_RETURN(made->result, taken.Wait());
    *out = made.Release();
    return absl::OkStatus();
  });
}

void dg_pipeline_step_destroy(dg_pipeline_step* step) noexcept {
  if (step == nullptr) return;
  GuardValue(0, [&] {
    const absl::StatusOr<Pinned<PipelineStepObject>> pinned = Pin<PipelineStepObject>(step, "step");
    // Of several that destroy it one does all of it.
    if (!pinned.ok() || !DestroyHandle<PipelineStepObject>(step)) return 0;
    EndStep(*(*pinned)->worker, (*pinned)->step);
    return 0;
  });
}

dg_error* dg_pipeline_evaluate(const dg_pipeline* pipeline, const dg_tensor* const* inputs,
                               size_t input_count, const dg_tensor* const* targets,
                               size_t target_count, const dg_pipeline_run_options* options,
                               dg_pipeline_result** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_RETURN_IF_ERROR(CheckMayWait());
    DG_ASSIGN_OR_RETURN(const Pinned<PipelineObject> pinned,
                        Pin<PipelineObject>(pipeline, "pipeline"));
    DG_ASSIGN_OR_RETURN(Batch batch, ToBatch(inputs, input_count, targets, target_count, options));
    DG_ASSIGN_OR_RETURN(const SharedWorker::Use use, pinned->worker->Begin());
    auto object = std::make_unique<PipelineResultObject>();
    DG_ASSIGN_OR_RETURN(object->result,
                        pinned->pipeline->Evaluate(std::move(batch.inputs),
                                                   std::move(batch.targets), batch.deadline));
    *out = AdoptHandle(std::move(object));
    return absl::OkStatus();
  });
}

dg_error* dg_pipeline_result_loss(const dg_pipeline_result* result, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<PipelineResultObject> pinned,
                        Pin<PipelineResultObject>(result, "result"));
    *out = NewTensorHandle(pinned->result.loss);
    return absl::OkStatus();
  });
}

dg_error* dg_pipeline_result_losses(const dg_pipeline_result* result, dg_message** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<PipelineResultObject> pinned,
                        Pin<PipelineResultObject>(result, "result"));
    *out = NewHandle<MessageObject>(Message{{}, pinned->result.losses});
    return absl::OkStatus();
  });
}

size_t dg_pipeline_result_output_count(const dg_pipeline_result* result) noexcept {
  return GuardValue<size_t>(0, [&]() -> size_t {
    const absl::StatusOr<Pinned<PipelineResultObject>> pinned =
        Pin<PipelineResultObject>(result, "result");
    return pinned.ok() ? (*pinned)->result.outputs.size() : 0;
  });
}

dg_error* dg_pipeline_result_outputs(const dg_pipeline_result* result, size_t micro_batch,
                                     dg_message** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<PipelineResultObject> pinned,
                        Pin<PipelineResultObject>(result, "result"));
    const std::vector<Tensors>& outputs = pinned->result.outputs;
    if (micro_batch >= outputs.size()) {
      return absl::InvalidArgumentError(absl::StrCat("there are outputs of ", outputs.size(),
                                                     " micro-batches, and none of ", micro_batch));
    }
    *out = NewHandle<MessageObject>(Message{{}, outputs[micro_batch]});
    return absl::OkStatus();
  });
}

void dg_pipeline_result_destroy(dg_pipeline_result* result) noexcept {
  DestroyHandle<PipelineResultObject>(result);
}

}  // extern "C"
