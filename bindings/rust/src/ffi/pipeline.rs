//! Pipelines, as they cross to C++ (pipeline.cc), and the functions of their stages, which C++ calls.
use super::{
    callback::{run, Quiet},
    handle::*,
};
use crate::{
    error::BoxedError, Action, Context, Error, Message, MicroBatch, Result, StageSpan, Tensor,
};
use std::{
    any::Any,
    mem::ManuallyDrop,
    panic::{catch_unwind, resume_unwind, AssertUnwindSafe},
    sync::{Mutex, MutexGuard, PoisonError},
};

#[cxx::bridge(namespace = "distgrad_rust")]
pub(crate) mod raw {
    /// `dg_action`.
    #[derive(Clone, Copy)]
    struct RawAction {
        kind: u32,
        stage: u32,
        micro_batch: u32,
    }

    /// `dg_action_list`.
    struct RawActionList {
        actions: Vec<RawAction>,
    }

    /// `dg_schedule_data`, but for its size.
    struct RawScheduleData {
        micro_batches: u64,
        rank_of_stage: Vec<u32>,
        lists: Vec<RawActionList>,
        max_activations: Vec<u32>,
    }

    /// When the actions of a rank begin.
    struct RawStarts {
        times: Vec<f64>,
    }

    /// What `dg_schedule_simulate` stores.
    struct RawTimeline {
        end: f64,
        busy: Vec<f64>,
        max_activations: Vec<u32>,
        starts: Vec<RawStarts>,
    }

    /// `dg_micro_batch`.
    struct RawMicroBatch<'a> {
        stage: u64,
        inputs: &'a [TensorHandle],
        outputs: &'a [TensorHandle],
        targets: &'a [TensorHandle],
    }

    /// `dg_stage_span`, but for its size.
    struct RawStageSpan {
        rank: u64,
        step: u64,
        action: RawAction,
        begin_ns: i64,
        end_ns: i64,
    }

    /// `dg_pipeline_stage`, but for its size and its functions.
    struct RawStage<'a> {
        number: u64,
        has_loss: bool,
        has_step: bool,
        has_on_action: bool,
        inputs: i64,
        targets: i64,
        flags: u64,
        tied_names: Vec<String>,
        tied: &'a [TensorHandle],
        skips: Vec<u64>,
    }

    extern "Rust" {
        type StageTable;
        fn forward(
            self: &StageTable,
            index: usize,
            micro_batch: &RawMicroBatch<'_>,
            outputs: &mut MessageHandle,
        ) -> ErrorHandle;
        fn loss(
            self: &StageTable,
            index: usize,
            micro_batch: &RawMicroBatch<'_>,
            loss: &mut TensorHandle,
        ) -> ErrorHandle;
        fn step(
            self: &StageTable,
            index: usize,
            worker: WorkerHandle,
            context: ContextHandle,
        ) -> ErrorHandle;
        fn on_action(self: &StageTable, index: usize, span: RawStageSpan) -> ErrorHandle;
        type Timer<'a>;
        fn time(self: &mut Timer<'_>, action: RawAction) -> f64;
    }

    unsafe extern "C++" {
        include!("distgrad/src/ffi/pipeline.h");

        type ErrorHandle = super::ErrorHandle;
        type TensorHandle = super::TensorHandle;
        type MessageHandle = super::MessageHandle;
        type WorkerHandle = super::WorkerHandle;
        type ContextHandle = super::ContextHandle;
        type AveragerHandle = super::AveragerHandle;
        type ScheduleHandle = super::ScheduleHandle;
        type PipelineStagesHandle = super::PipelineStagesHandle;
        type PipelineHandle = super::PipelineHandle;
        type PipelineResultHandle = super::PipelineResultHandle;
        type PipelineStepHandle = super::PipelineStepHandle;

        fn schedule_create(data: &RawScheduleData, flags: u64) -> Result<ScheduleHandle>;
        fn schedule_create_gpipe(stages: u64, micro_batches: u64) -> Result<ScheduleHandle>;
        fn schedule_create_one_forward_one_backward(
            stages: u64,
            micro_batches: u64,
        ) -> Result<ScheduleHandle>;
        fn schedule_create_interleaved_one_forward_one_backward(
            ranks: u64,
            stages_per_rank: u64,
            micro_batches: u64,
        ) -> Result<ScheduleHandle>;
        fn schedule_create_zero_bubble_h1(
            stages: u64,
            micro_batches: u64,
        ) -> Result<ScheduleHandle>;
        fn schedule_create_zero_bubble_h2(
            stages: u64,
            micro_batches: u64,
        ) -> Result<ScheduleHandle>;
        fn schedule_create_zero_bubble(
            stages: u64,
            micro_batches: u64,
            forwards_ahead: u64,
        ) -> Result<ScheduleHandle>;
        fn schedule_get(schedule: ScheduleHandle) -> RawScheduleData;
        fn schedule_simulate(
            schedule: ScheduleHandle,
            timer: &mut Timer<'_>,
        ) -> Result<RawTimeline>;
        fn schedule_destroy(schedule: ScheduleHandle);

        /// As many stages as the table has.
        fn pipeline_stages_create(
            worker: WorkerHandle,
            name: &str,
            stages: &[RawStage],
            table: Box<StageTable>,
            num_threads: u64,
            averager: AveragerHandle,
        ) -> Result<PipelineStagesHandle>;
        fn pipeline_stages_destroy(stages: PipelineStagesHandle);

        fn pipeline_create(
            worker: WorkerHandle,
            name: &str,
            schedule: ScheduleHandle,
            workers: &[&str],
            reduction: u64,
        ) -> Result<PipelineHandle>;
        fn pipeline_destroy(pipeline: PipelineHandle);
        fn pipeline_train(
            pipeline: PipelineHandle,
            context: ContextHandle,
            inputs: &[TensorHandle],
            targets: &[TensorHandle],
            timeout_ms: i64,
        ) -> Result<PipelineResultHandle>;
        fn pipeline_start(
            pipeline: PipelineHandle,
            context: ContextHandle,
            inputs: &[TensorHandle],
            targets: &[TensorHandle],
            timeout_ms: i64,
        ) -> Result<PipelineStepHandle>;
        fn pipeline_step_wait(step: PipelineStepHandle) -> Result<PipelineResultHandle>;
        fn pipeline_step_destroy(step: PipelineStepHandle);
        fn pipeline_evaluate(
            pipeline: PipelineHandle,
            inputs: &[TensorHandle],
            targets: &[TensorHandle],
            timeout_ms: i64,
        ) -> Result<PipelineResultHandle>;
        /// Null if there is none.
        fn pipeline_result_loss(result: PipelineResultHandle) -> Result<TensorHandle>;
        fn pipeline_result_losses(result: PipelineResultHandle) -> Result<MessageHandle>;
        fn pipeline_result_output_count(result: PipelineResultHandle) -> usize;
        fn pipeline_result_outputs(
            result: PipelineResultHandle,
            micro_batch: usize,
        ) -> Result<MessageHandle>;
        fn pipeline_result_destroy(result: PipelineResultHandle);
    }
}

type ForwardFn =
    dyn FnMut(&MicroBatch) -> std::result::Result<Vec<Option<Tensor>>, BoxedError> + Send;
type LossFn = dyn FnMut(&MicroBatch) -> std::result::Result<Tensor, BoxedError> + Send;
type StepFn = dyn FnMut(&Context<'_>) -> std::result::Result<(), BoxedError> + Send;
type ActionFn = dyn FnMut(StageSpan) -> std::result::Result<(), BoxedError> + Send;

/// The closures of a stage.
pub(crate) struct StageClosures {
    pub(crate) forward: Box<ForwardFn>,
    pub(crate) loss: Option<Box<LossFn>>,
    pub(crate) step: Option<Box<StepFn>>,
    pub(crate) on_action: Option<Box<ActionFn>>,
}

/// Those of all stages that are created together.
pub(crate) struct StageTable(Vec<Quiet<Mutex<StageClosures>>>);

impl StageTable {
    pub(crate) fn new(stages: impl IntoIterator<Item = StageClosures>) -> Box<Self> {
        let stages = stages.into_iter().map(|stage| Quiet(ManuallyDrop::new(Mutex::new(stage))));
        Box::new(Self(stages.collect()))
    }

    /// The library calls one function of a stage at a time, so that this does not wait. One that
    /// panicked may be called again.
    fn lock(&self, index: usize) -> MutexGuard<'_, StageClosures> {
        self.0[index].0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forward(
        &self,
        index: usize,
        micro_batch: &raw::RawMicroBatch<'_>,
        outputs: &mut MessageHandle,
    ) -> ErrorHandle {
        let made = run("the forward", || {
            let made = (self.lock(index).forward)(&MicroBatch::new(micro_batch)?)?;
            let made: Vec<_> = made.iter().map(Option::as_ref).collect();
            Ok(Message::with_gaps("", &made)?)
        });
        made.map_or_else(
            |error| error,
            |made| {
                *outputs = made.release();
                ErrorHandle::NULL
            },
        )
    }

    fn loss(
        &self,
        index: usize,
        micro_batch: &raw::RawMicroBatch<'_>,
        loss: &mut TensorHandle,
    ) -> ErrorHandle {
        let made = run("the loss", || {
            let micro_batch = MicroBatch::new(micro_batch)?;
            match &mut self.lock(index).loss {
                Some(function) => function(&micro_batch),
                None => Err("the stage has no loss".into()),
            }
        });
        made.map_or_else(
            |error| error,
            |made| {
                *loss = made.release();
                ErrorHandle::NULL
            },
        )
    }

    fn step(&self, index: usize, worker: WorkerHandle, context: ContextHandle) -> ErrorHandle {
        let context = ManuallyDrop::new(Context::own(worker, context)); // the library's
        let made = run("the step", || match &mut self.lock(index).step {
            Some(function) => function(&context),
            None => Err("the stage has no step".into()),
        });
        made.map_or_else(|error| error, |()| ErrorHandle::NULL)
    }

    fn on_action(&self, index: usize, span: raw::RawStageSpan) -> ErrorHandle {
        let told = run("on_action", || match &mut self.lock(index).on_action {
            Some(function) => function(span.try_into()?),
            None => Err("the stage has no on_action".into()),
        });
        told.err().unwrap_or(ErrorHandle::NULL)
    }
}

/// Says how long an action takes.
pub(crate) struct Timer<'a> {
    time: &'a mut dyn FnMut(Action) -> f64,
    panic: Option<Box<dyn Any + Send>>,
    error: Option<Error>,
}

impl<'a> Timer<'a> {
    pub(crate) fn new(time: &'a mut dyn FnMut(Action) -> f64) -> Self {
        Self { time, panic: None, error: None }
    }
    /// Goes on with a panic, and returns an error, if there was one.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(payload) = self.panic {
            resume_unwind(payload);
        }
        self.error.map_or(Ok(()), Err)
    }

    fn time(&mut self, action: raw::RawAction) -> f64 {
        if self.panic.is_some() || self.error.is_some() {
            return 0.0;
        }
        match catch_unwind(AssertUnwindSafe(|| Ok((self.time)(action.try_into()?)))) {
            Ok(Ok(time)) => return time,
            Ok(Err(error)) => self.error = Some(error),
            Err(payload) => self.panic = Some(payload),
        }
        0.0
    }
}
