// What Rust calls of pipelines, as shim.h.
#ifndef DISTGRAD_BINDINGS_RUST_PIPELINE_H_
#define DISTGRAD_BINDINGS_RUST_PIPELINE_H_

#include "distgrad/src/ffi/shim.h"

namespace distgrad_rust {

using ScheduleHandle = dg_schedule*;
using PipelineStagesHandle = dg_pipeline_stages*;
using PipelineHandle = dg_pipeline*;
using PipelineResultHandle = dg_pipeline_result*;
using PipelineStepHandle = dg_pipeline_step*;

struct RawScheduleData;
struct RawTimeline;
struct RawStage;
struct StageTable;
struct Timer;

ScheduleHandle schedule_create(const RawScheduleData& data, uint64_t flags);
inline ScheduleHandle schedule_create_gpipe(uint64_t stages, uint64_t micro_batches) {
  return Out<ScheduleHandle>(dg_schedule_create_gpipe, stages, micro_batches);
}
inline ScheduleHandle schedule_create_one_forward_one_backward(uint64_t stages,
                                                               uint64_t micro_batches) {
  return Out<ScheduleHandle>(dg_schedule_create_one_forward_one_backward, stages, micro_batches);
}
inline ScheduleHandle schedule_create_interleaved_one_forward_one_backward(uint64_t ranks,
                                                                           uint64_t stages_per_rank,
                                                                           uint64_t micro_batches) {
  return Out<ScheduleHandle>(dg_schedule_create_interleaved_one_forward_one_backward, ranks,
                             stages_per_rank, micro_batches);
}
inline ScheduleHandle schedule_create_zero_bubble_h1(uint64_t stages, uint64_t micro_batches) {
  return Out<ScheduleHandle>(dg_schedule_create_zero_bubble_h1, stages, micro_batches);
}
inline ScheduleHandle schedule_create_zero_bubble_h2(uint64_t stages, uint64_t micro_batches) {
  return Out<ScheduleHandle>(dg_schedule_create_zero_bubble_h2, stages, micro_batches);
}
inline ScheduleHandle schedule_create_zero_bubble(uint64_t stages, uint64_t micro_batches,
                                                  uint64_t forwards_ahead) {
  return Out<ScheduleHandle>(dg_schedule_create_zero_bubble, stages, micro_batches, forwards_ahead);
}
RawScheduleData schedule_get(ScheduleHandle schedule);
RawTimeline schedule_simulate(ScheduleHandle schedule, Timer& timer);
inline void schedule_destroy(ScheduleHandle schedule) { dg_schedule_destroy(schedule); }

PipelineStagesHandle pipeline_stages_create(WorkerHandle worker, rust::Str name,
                                            rust::Slice<const RawStage> stages,
                                            rust::Box<StageTable> table, uint64_t num_threads,
                                            AveragerHandle averager);
inline void pipeline_stages_destroy(PipelineStagesHandle stages) {
  dg_pipeline_stages_destroy(stages);
}

PipelineHandle pipeline_create(WorkerHandle worker, rust::Str name, ScheduleHandle schedule,
                               Texts workers, uint64_t reduction);
inline void pipeline_destroy(PipelineHandle pipeline) { dg_pipeline_destroy(pipeline); }
inline dg_pipeline_run_options RunOptions(int64_t timeout_ms) {
  dg_pipeline_run_options options = DG_PIPELINE_RUN_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return options;
}
inline PipelineResultHandle pipeline_train(PipelineHandle pipeline, ContextHandle context,
                                           Tensors inputs, Tensors targets, int64_t timeout_ms) {
  const dg_pipeline_run_options options = RunOptions(timeout_ms);
  return Out<PipelineResultHandle>(dg_pipeline_train, pipeline, context, inputs.data(),
                                   inputs.size(), targets.data(), targets.size(), &options);
}
inline PipelineStepHandle pipeline_start(PipelineHandle pipeline, ContextHandle context,
                                         Tensors inputs, Tensors targets, int64_t timeout_ms) {
  const dg_pipeline_run_options options = RunOptions(timeout_ms);
  return Out<PipelineStepHandle>(dg_pipeline_start, pipeline, context, inputs.data(), inputs.size(),
                                 targets.data(), targets.size(), &options);
}
inline PipelineResultHandle pipeline_step_wait(PipelineStepHandle step) {
  return Out<PipelineResultHandle>(dg_pipeline_step_wait, step);
}
inline void pipeline_step_destroy(PipelineStepHandle step) { dg_pipeline_step_destroy(step); }
inline PipelineResultHandle pipeline_evaluate(PipelineHandle pipeline, Tensors inputs,
                                              Tensors targets, int64_t timeout_ms) {
  const dg_pipeline_run_options options = RunOptions(timeout_ms);
  return Out<PipelineResultHandle>(dg_pipeline_evaluate, pipeline, inputs.data(), inputs.size(),
                                   targets.data(), targets.size(), &options);
}
inline TensorHandle pipeline_result_loss(PipelineResultHandle result) {
  return Out<TensorHandle>(dg_pipeline_result_loss, result);
}
inline MessageHandle pipeline_result_losses(PipelineResultHandle result) {
  return Out<MessageHandle>(dg_pipeline_result_losses, result);
}
inline size_t pipeline_result_output_count(PipelineResultHandle result) {
  return dg_pipeline_result_output_count(result);
}
inline MessageHandle pipeline_result_outputs(PipelineResultHandle result, size_t micro_batch) {
  return Out<MessageHandle>(dg_pipeline_result_outputs, result, micro_batch);
}
inline void pipeline_result_destroy(PipelineResultHandle result) {
  dg_pipeline_result_destroy(result);
}

}  // namespace distgrad_rust

#endif  // DISTGRAD_BINDINGS_RUST_PIPELINE_H_
