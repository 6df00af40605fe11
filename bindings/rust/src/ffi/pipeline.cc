// Gives schedules and stages to C, and calls the closures of stages from their functions.
#include "distgrad/src/ffi/pipeline.h"

#include <memory>
#include <utility>
#include <vector>

#include "distgrad/src/ffi/pipeline.rs.h"

namespace distgrad_rust {
namespace {

// What src/pipeline.rs takes these to be.
static_assert(DG_ACTION_FORWARD == 0 && DG_ACTION_BACKWARD_WEIGHT == 3 &&
              DG_ACTION_RECEIVE_GRADIENT == 7 && DG_ACTION_STEP == 8 &&
              DG_SCHEDULE_ADD_TRANSFERS == 1 && DG_SCHEDULE_ADD_STEPS == 2 &&
              DG_PIPELINE_STAGE_RECOMPUTE == 1 && DG_ANY_COUNT == -1 && DG_REDUCTION_MEAN == 0 &&
              DG_REDUCTION_SUM == 1);

template <typename T>
rust::Vec<T> ToVec(const T* data, size_t size) {
  rust::Vec<T> copy;
  copy.reserve(size);
  for (size_t i = 0; i < size; ++i) copy.push_back(data[i]);
  return copy;
}
template <typename T>
rust::Vec<T> ToVec(const std::vector<T>& from) {
  return ToVec(from.data(), from.size());
}

// The closures of stages that are created together, and the worker that they run on.
struct Stages {
  WorkerHandle worker;
  rust::Box<StageTable> table;
};

// The user data of one of these stages.
struct StageData {
  std::shared_ptr<const Stages> stages;
  size_t index;

  static void End(void* user_data) { delete static_cast<StageData*>(user_data); }
};

// Handles are numbers: borrowed ones are not written through on the other side.
Tensors ToTensors(const dg_tensor* const* tensors, size_t count) {
  return {const_cast<dg_tensor* const*>(tensors), count};
}
RawMicroBatch ToMicroBatch(const dg_micro_batch* from) {
  return {from->stage, ToTensors(from->inputs, from->input_count),
          ToTensors(from->outputs, from->output_count),
          ToTensors(from->targets, from->target_count)};
}

dg_error* RunForward(void* user_data, const dg_micro_batch* micro_batch,
                     dg_message** outputs) noexcept {
  const auto* data = static_cast<const StageData*>(user_data);
  return data->stages->table->forward(data->index, ToMicroBatch(micro_batch), *outputs);
}

dg_error* RunLoss(void* user_data, const dg_micro_batch* micro_batch, dg_tensor** loss) noexcept {
  const auto* data = static_cast<const StageData*>(user_data);
  return data->stages->table->loss(data->index, ToMicroBatch(micro_batch), *loss);
}

dg_error* RunStep(void* user_data, const dg_context* context) noexcept {
  const auto* data = static_cast<const StageData*>(user_data);
  return data->stages->table->step(data->index, data->stages->worker,
                                   const_cast<dg_context*>(context));
}

dg_error* RunOnAction(void* user_data, const dg_stage_span* span) noexcept {
  const auto* data = static_cast<const StageData*>(user_data);
  const dg_action& action = *span->action;
  return data->stages->table->on_action(
      data->index,
      RawStageSpan{span->rank, span->step, RawAction{action.kind, action.stage, action.micro_batch},
                   span->begin_ns, span->end_ns});
}

}  // namespace

ScheduleHandle schedule_create(const RawScheduleData& from, uint64_t flags) {
  std::vector<std::vector<dg_action>> actions;
  for (const RawActionList& list : from.lists) {
    std::vector<dg_action>& copy = actions.emplace_back();
    for (const RawAction& action : list.actions) {
      copy.push_back({action.kind, action.stage, action.micro_batch});
    }
  }
  std::vector<dg_action_list> lists;
  for (const std::vector<dg_action>& list : actions) lists.push_back({list.data(), list.size()});
  dg_schedule_data data = DG_SCHEDULE_DATA_INIT;
  data.micro_batches = from.micro_batches;
  data.rank_of_stage = from.rank_of_stage.data();
  data.stage_count = from.rank_of_stage.size();
  data.lists = lists.data();
  data.rank_count = lists.size();
  data.max_activations = from.max_activations.empty() ? nullptr : from.max_activations.data();
  return Out<ScheduleHandle>(dg_schedule_create, &data, flags);
}

RawScheduleData schedule_get(ScheduleHandle schedule) {
  RawScheduleData copy{};
  const dg_schedule_data* const data = dg_schedule_get(schedule);
  if (data == nullptr) return copy;
  copy.micro_batches = data->micro_batches;
  copy.rank_of_stage = ToVec(data->rank_of_stage, data->stage_count);
  for (size_t rank = 0; rank < data->rank_count; ++rank) {
    RawActionList list;
    for (size_t i = 0; i < data->lists[rank].size; ++i) {
      const dg_action& action = data->lists[rank].data[i];
      list.actions.push_back({action.kind, action.stage, action.micro_batch});
    }
    copy.lists.push_back(std::move(list));
  }
  if (data->max_activations != nullptr) {
    copy.max_activations = ToVec(data->max_activations, data->rank_count);
  }
  return copy;
}

RawTimeline schedule_simulate(ScheduleHandle schedule, Timer& timer) {
  const dg_schedule_data* const data = dg_schedule_get(schedule);
  const size_t ranks = data == nullptr ? 0 : data->rank_count;
  std::vector<double> busy(ranks);
  std::vector<uint32_t> max_activations(ranks);
  std::vector<std::vector<double>> starts(ranks);
  std::vector<double*> pointers;
  for (size_t rank = 0; rank < ranks; ++rank) {
    starts[rank].resize(data->lists[rank].size);
    pointers.push_back(starts[rank].data());
  }
  const auto time = [](void* user_data, const dg_action* action) {
    return static_cast<Timer*>(user_data)->time(
        RawAction{action->kind, action->stage, action->micro_batch});
  };
  RawTimeline timeline{};
  dg::Check(dg_schedule_simulate(schedule, time, &timer, &timeline.end, busy.data(),
                                 max_activations.data(), pointers.data()));
  timeline.busy = ToVec(busy);
  timeline.max_activations = ToVec(max_activations);
  for (const std::vector<double>& list : starts) timeline.starts.push_back({ToVec(list)});
  return timeline;
}

PipelineStagesHandle pipeline_stages_create(WorkerHandle worker, rust::Str name,
                                            rust::Slice<const RawStage> from,
                                            rust::Box<StageTable> table, uint64_t num_threads,
                                            AveragerHandle averager) {
  const auto shared = std::make_shared<const Stages>(Stages{worker, std::move(table)});
  std::vector<dg_pipeline_stage> stages;
  std::vector<std::vector<dg_str>> tied_names(from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    dg_pipeline_stage stage = DG_PIPELINE_STAGE_INIT;
    for (const rust::String& name : from[i].tied_names) {
      tied_names[i].push_back({name.data(), name.size()});
    }
    stage.tied_names = tied_names[i].data();
    stage.tied = from[i].tied.data();
    stage.tied_count = from[i].tied.size();
    stage.skips = from[i].skips.data();
    stage.skip_count = from[i].skips.size();
    stage.number = from[i].number;
    stage.forward = RunForward;
    if (from[i].has_loss) stage.loss = RunLoss;
    if (from[i].has_step) stage.step = RunStep;
    if (from[i].has_on_action) stage.on_action = RunOnAction;
    stage.inputs = from[i].inputs;
    stage.targets = from[i].targets;
    stage.flags = from[i].flags;
    stages.push_back(stage);
  }
  std::vector<const dg_pipeline_stage*> pointers;
  for (const dg_pipeline_stage& stage : stages) pointers.push_back(&stage);
  for (size_t i = 0; i < stages.size(); ++i) {
    stages[i].user_data = new StageData{shared, i};
    stages[i].destroy = StageData::End;
  }
  dg_pipeline_stages_options options = DG_PIPELINE_STAGES_OPTIONS_INIT;
  options.num_threads = num_threads;
  options.averager = averager;
  return Out<PipelineStagesHandle>(dg_pipeline_stages_create, worker, ToStr(name), pointers.data(),
                                   pointers.size(), &options);
}

PipelineHandle pipeline_create(WorkerHandle worker, rust::Str name, ScheduleHandle schedule,
                               Texts workers, uint64_t reduction) {
  std::vector<dg_str> names;
  for (rust::Str each : workers) names.push_back(ToStr(each));
  dg_pipeline_options options = DG_PIPELINE_OPTIONS_INIT;
  options.reduction = reduction;
  return Out<PipelineHandle>(dg_pipeline_create, worker, ToStr(name), schedule, names.data(),
                             names.size(), &options);
}

}  // namespace distgrad_rust
