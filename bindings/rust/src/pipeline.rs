//! Pipelines: a model in stages on several workers, which micro-batches run through.
use crate::{
    error::BoxedError,
    ffi::{
        raw_pipeline as raw, AveragerHandle, Handle, Owned, PipelineHandle, PipelineResultHandle,
        PipelineStagesHandle, PipelineStepHandle, ScheduleHandle, StageClosures, StageTable,
        TensorHandle, Timer,
    },
    future::milliseconds_or_default,
    message::handles_of,
    Code, Context, Error, GradientAverager, Message, Result, Tensor, Worker,
};
use std::{
    fmt,
    marker::PhantomData,
    time::{Duration, SystemTime},
};

// ----------------------------------------------------------------------------------- Schedules

/// What a rank of a pipeline does: a line of its list.
///
/// ```
/// use distgrad::{Action, ActionKind, Schedule};
/// let data = Schedule::gpipe(2, 4)?.data()?; // stages, micro-batches
/// let first = Action { kind: ActionKind::Forward, stage: 0, micro_batch: 0 };
/// assert_eq!(data.lists[0][0], first); // what rank 0 begins with
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_action")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What is done.
    pub kind: ActionKind,
    /// By or for which stage.
    pub stage: u32,
    /// With which micro-batch; 0 for a step.
    pub micro_batch: u32,
}

/// The kinds of actions.
///
/// ```
/// use distgrad::{ActionKind, Schedule};
/// let data = Schedule::one_forward_one_backward(2, 8)?.data()?; // stages, micro-batches
/// let backwards = data.lists[1].iter().filter(|action| action.kind == ActionKind::Backward);
/// assert_eq!(backwards.count(), 8); // of rank 1, one for each micro-batch
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ActionKind {
    /// The forward, which the loss follows in the last stage.
    Forward = 0,
    /// All of the backward.
    Backward = 1,
    /// Its first half: the gradients of what the stage was given, for which the stage before waits.
    BackwardInput = 2,
    /// Its second half: those of the stage's parameters, for which nobody waits.
    BackwardWeight = 3,
    /// To the rank of the next stage. A send does not wait.
    SendActivation = 4,
    /// From the rank of the stage before.
    ReceiveActivation = 5,
    /// To the rank of the stage before.
    SendGradient = 6,
    /// From the rank of the next stage.
    ReceiveGradient = 7,
    /// What [`PipelineStage::step`] says. Of no micro-batch.
    Step = 8,
}

impl TryFrom<raw::RawAction> for Action {
    type Error = Error;

    fn try_from(raw: raw::RawAction) -> Result<Self> {
        use ActionKind::*;
        const KINDS: [ActionKind; 9] = [
            Forward,
            Backward,
            BackwardInput,
            BackwardWeight,
            SendActivation,
            ReceiveActivation,
            SendGradient,
            ReceiveGradient,
            Step,
        ];
        let kind =
            *KINDS.get(raw.kind as usize).ok_or_else(|| Error::unknown_kind(raw.kind.into()))?;
        Ok(Self { kind, stage: raw.stage, micro_batch: raw.micro_batch })
    }
}

impl From<Action> for raw::RawAction {
    fn from(action: Action) -> Self {
        let Action { kind, stage, micro_batch } = action;
        Self { kind: kind as u32, stage, micro_batch }
    }
}

/// A schedule as data, to change and to make one's own.
///
/// ```
/// use distgrad::{Action, ActionKind::*, Schedule, ScheduleData};
/// let action = |kind, stage| Action { kind, stage, micro_batch: 0 };
/// let schedule = Schedule::with_transfers(&ScheduleData {
///     micro_batches: 1,
///     rank_of_stage: vec![0, 1],
///     lists: vec![
///         vec![action(Forward, 0), action(Backward, 0)],
///         vec![action(Forward, 1), action(Backward, 1)],
///     ],
///     max_activations: Vec::new(),
/// })?;
/// let data = schedule.data()?;
/// assert_eq!(data.lists[0][1], action(SendActivation, 0)); // which was put there
/// assert!(Schedule::new(&ScheduleData { micro_batches: 2, ..data }).is_err()); // half is missing
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_schedule_data")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduleData {
    /// How many micro-batches a batch is cut into.
    pub micro_batches: u64,
    /// The rank of each stage. Stage s gives its outputs to stage s + 1.
    pub rank_of_stage: Vec<u32>,
    /// What each rank does, one after the other.
    pub lists: Vec<Vec<Action>>,
    /// How many activations each rank holds at once, at most: of a stage and a micro-batch, from
    /// the forward until its backward, or both halves, are done. Empty: nothing is promised.
    pub max_activations: Vec<u32>,
}

/// When a schedule does what.
///
/// ```
/// use distgrad::{ActionKind, Schedule, Timeline};
/// let timeline: Timeline = Schedule::gpipe(2, 4)?.simulate(|action| match action.kind {
///     ActionKind::Forward | ActionKind::Backward => 1.0,
///     _ => 0.0, // sends and receives take no time here
/// })?;
/// assert_eq!((timeline.end, timeline.busy[0]), (10.0, 8.0)); // so rank 0 is idle for 2
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Timeline {
    /// When the last rank is through.
    pub end: f64,
    /// The sum of the times of each rank's actions.
    pub busy: Vec<f64>,
    /// How many activations each rank holds at once.
    pub max_activations: Vec<u32>,
    /// When each action of each rank's list begins.
    pub starts: Vec<Vec<f64>>,
}

/// In which order the ranks of a pipeline do what is to be done for one batch: each does the actions
/// of its list one after the other; what comes from another rank it waits for. It keeps what it
/// promises: nothing is missing, there twice, before what it needs, or waits for ever.
///
/// docs/pipelines.md compares those that are made here.
///
/// ```
/// use distgrad::{ActionKind, Schedule};
/// let schedule = Schedule::one_forward_one_backward(4, 8)?;
/// let timeline = schedule.simulate(|action| match action.kind {
///     ActionKind::Forward => 1.0,
///     ActionKind::Backward => 2.0,
///     _ => 0.0, // sends and receives take no time here
/// })?;
/// assert_eq!(timeline.end, 8.0 * 3.0 + 3.0 * 3.0); // the work of a rank, and its bubble
/// assert_eq!(timeline.max_activations, [4, 3, 2, 1]);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_schedule")]
#[doc(alias = "dg_schedule_destroy")]
pub struct Schedule(Owned<ScheduleHandle>);

impl Schedule {
    fn own(handle: ScheduleHandle) -> Self {
        Self(Owned::new(handle))
    }

    /// All forwards, and then all backwards, with one stage on each rank.
    ///
    /// Errors of this and of the other five: `Code::InvalidArgument` for 0, and for more than a
    /// million micro-batches of stages.
    #[doc(alias = "dg_schedule_create_gpipe")]
    pub fn gpipe(stages: u64, micro_batches: u64) -> Result<Self> {
        Ok(Self::own(raw::schedule_create_gpipe(stages, micro_batches)?))
    }
    /// 1F1B: as few forwards before the first backward as keep all busy, then a backward for each
    /// forward. As fast as [`gpipe`](Schedule::gpipe), and holds fewer activations.
    #[doc(alias = "dg_schedule_create_one_forward_one_backward")]
    pub fn one_forward_one_backward(stages: u64, micro_batches: u64) -> Result<Self> {
        Ok(Self::own(raw::schedule_create_one_forward_one_backward(stages, micro_batches)?))
    }
    /// The same with several stages on each rank: stage s is on rank s % ranks.
    #[doc(alias = "dg_schedule_create_interleaved_one_forward_one_backward")]
    pub fn interleaved_one_forward_one_backward(
        ranks: u64,
        stages_per_rank: u64,
        micro_batches: u64,
    ) -> Result<Self> {
        let handle = raw::schedule_create_interleaved_one_forward_one_backward(
            ranks,
            stages_per_rank,
            micro_batches,
        )?;
        Ok(Self::own(handle))
    }
    /// ZB-H1: 1F1B with backward in two halves, the second of which fills what would be idle. The
    /// first stage's backward stays whole, as nobody waits for its first half.
    #[doc(alias = "dg_schedule_create_zero_bubble_h1")]
    pub fn zero_bubble_h1(stages: u64, micro_batches: u64) -> Result<Self> {
        Ok(Self::own(raw::schedule_create_zero_bubble_h1(stages, micro_batches)?))
    }
    /// ZB-H2: ZB-H1 with twice as many forwards ahead, so that each rank has work while the first
    /// gradients come back, and what comes late holds up less. Holds up to twice as many
    /// activations. With fewer than 2 (stages - 1) micro-batches
    /// [`zero_bubble_h1`](Schedule::zero_bubble_h1) is the better one, as a rule.
    #[doc(alias = "dg_schedule_create_zero_bubble_h2")]
    pub fn zero_bubble_h2(stages: u64, micro_batches: u64) -> Result<Self> {
        Ok(Self::own(raw::schedule_create_zero_bubble_h2(stages, micro_batches)?))
    }
    /// [`zero_bubble_h1`](Schedule::zero_bubble_h1) is this with one forward ahead for each rank
    /// behind a rank, [`zero_bubble_h2`](Schedule::zero_bubble_h2) with two. More fill the time of
    /// slower hand-overs, where steps are in flight behind each other ([`Pipeline::start`]), and
    /// hold as many more activations.
    ///
    /// ```
    /// use distgrad::Schedule;
    /// # fn main() -> distgrad::Result<()> {
    /// let schedule = Schedule::zero_bubble(2, 8, 3)?; // two stages, eight micro-batches
    /// assert_eq!(schedule.data()?.max_activations, [4, 4]);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_schedule_create_zero_bubble")]
    pub fn zero_bubble(stages: u64, micro_batches: u64, forwards_ahead: u64) -> Result<Self> {
        let handle = raw::schedule_create_zero_bubble(stages, micro_batches, forwards_ahead)?;
        Ok(Self::own(handle))
    }

    /// Creates a schedule of lists of one's own. `Code::InvalidArgument` names the action that is
    /// wrong, and why.
    #[doc(alias = "dg_schedule_create")]
    pub fn new(data: &ScheduleData) -> Result<Self> {
        Self::create(data, 0)
    }
    /// The same of lists without sends and receives: a send is put behind each action whose result
    /// another rank needs, and a receive before each action that needs one.
    #[doc(alias = "DG_SCHEDULE_ADD_TRANSFERS")]
    pub fn with_transfers(data: &ScheduleData) -> Result<Self> {
        Self::create(data, 1)
    }
    /// The same with the optimizer's step of each stage behind the list of its rank, where steps
    /// in flight behind each other train ([`Pipeline::start`]). `Code::InvalidArgument` if it has
    /// steps already.
    ///
    /// ```
    /// use distgrad::{ActionKind, Schedule};
    /// # fn main() -> distgrad::Result<()> {
    /// let schedule = Schedule::zero_bubble_h2(2, 8)?.with_steps()?;
    /// assert_eq!(schedule.data()?.lists[1].last().unwrap().kind, ActionKind::Step);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "DG_SCHEDULE_ADD_STEPS")]
    pub fn with_steps(&self) -> Result<Self> {
        Self::create(&self.data()?, 2)
    }
    fn create(data: &ScheduleData, flags: u64) -> Result<Self> {
        if !data.max_activations.is_empty() && data.max_activations.len() != data.lists.len() {
            return Err(Error::invalid("max_activations has not one number for each rank"));
        }
        let lists = data.lists.iter().map(|list| raw::RawActionList {
            actions: list.iter().copied().map(Into::into).collect(),
        });
        let raw = raw::RawScheduleData {
            micro_batches: data.micro_batches,
            rank_of_stage: data.rank_of_stage.clone(),
            lists: lists.collect(),
            max_activations: data.max_activations.clone(),
        };
        Ok(Self::own(raw::schedule_create(&raw, flags)?))
    }

    /// Returns what it is, to change a copy, for instance.
    #[doc(alias = "dg_schedule_get")]
    pub fn data(&self) -> Result<ScheduleData> {
        let raw = raw::schedule_get(self.0.get());
        let actions =
            |list: raw::RawActionList| list.actions.into_iter().map(Action::try_from).collect();
        Ok(ScheduleData {
            micro_batches: raw.micro_batches,
            rank_of_stage: raw.rank_of_stage,
            lists: raw.lists.into_iter().map(actions).collect::<Result<_>>()?,
            max_activations: raw.max_activations,
        })
    }

    /// Runs the lists as ranks do; `time` says how long an action takes, in any unit.
    #[doc(alias = "dg_schedule_simulate")]
    pub fn simulate(&self, mut time: impl FnMut(Action) -> f64) -> Result<Timeline> {
        let mut timer = Timer::new(&mut time);
        let raw = raw::schedule_simulate(self.0.get(), &mut timer);
        timer.finish()?;
        let raw = raw?;
        Ok(Timeline {
            end: raw.end,
            busy: raw.busy,
            max_activations: raw.max_activations,
            starts: raw.starts.into_iter().map(|starts| starts.times).collect(),
        })
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = raw::schedule_get(self.0.get());
        let (stages, ranks) = (raw.rank_of_stage.len(), raw.lists.len());
        write!(f, "Schedule({stages} stages on {ranks} ranks, {} micro-batches)", raw.micro_batches)
    }
}

// -------------------------------------------------------------------------------------- Stages

/// What a function of a stage gets, of one micro-batch.
///
/// ```
/// use distgrad::{MicroBatch, PipelineStage};
/// let stage = PipelineStage::new(0, |batch: &MicroBatch| {
///     let x = batch.input(0)?;
///     Ok([match &batch.inputs()[1] {
///         Some(mask) => x.mul(mask)?,
///         None => x.relu()?,
///     }])
/// })
/// .inputs(Some(2));
/// # drop(stage);
/// ```
#[doc(alias = "dg_micro_batch")]
#[derive(Debug)]
pub struct MicroBatch {
    stage: u64,
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Option<Tensor>>,
    targets: Vec<Option<Tensor>>,
}

impl MicroBatch {
    pub(crate) fn new(raw: &raw::RawMicroBatch<'_>) -> Result<Self> {
        let shared = |handles: &[TensorHandle]| -> Result<Vec<Option<Tensor>>> {
            handles.iter().copied().map(Tensor::share).collect()
        };
        Ok(Self {
            stage: raw.stage,
            inputs: shared(raw.inputs)?,
            outputs: shared(raw.outputs)?,
            targets: shared(raw.targets)?,
        })
    }

    /// Returns the number of the stage.
    pub fn stage(&self) -> u64 {
        self.stage
    }
    /// Returns what a forward gets: what the stage before has given, or the batch's part; `None`
    /// where there is no tensor. Empty for a loss.
    pub fn inputs(&self) -> &[Option<Tensor>] {
        &self.inputs
    }
    /// Returns what a loss gets: what forward has given. Empty for a forward.
    pub fn outputs(&self) -> &[Option<Tensor>] {
        &self.outputs
    }
    /// Returns what a loss gets of the batch's targets. Empty for a forward.
    pub fn targets(&self) -> &[Option<Tensor>] {
        &self.targets
    }
    /// Returns one of the inputs; `Code::OutOfRange` beyond the last, and where there is no tensor.
    pub fn input(&self, index: usize) -> Result<&Tensor> {
        at(&self.inputs, "input", index)
    }
    /// Returns one of the outputs; errors as of [`input`](MicroBatch::input).
    pub fn output(&self, index: usize) -> Result<&Tensor> {
        at(&self.outputs, "output", index)
    }
    /// Returns one of the targets; errors as of [`input`](MicroBatch::input).
    pub fn target(&self, index: usize) -> Result<&Tensor> {
        at(&self.targets, "target", index)
    }
}

fn at<'a>(tensors: &'a [Option<Tensor>], what: &str, index: usize) -> Result<&'a Tensor> {
    tensors.get(index).and_then(Option::as_ref).ok_or_else(|| {
        Error::new(Code::OutOfRange, format!("the micro-batch has no {what} {index}"))
    })
}

/// An action of a rank that is over, with its times. A receive includes the wait for what another
/// rank sends; so does the forward of stage 0, which waits for the batch, and that of the last
/// stage, which waits for the targets.
///
/// ```
/// use distgrad::{PipelineStage, StageSpan};
/// let stage = PipelineStage::new(0, |batch| Ok([batch.input(0)?.relu()?]));
/// let stage = stage.on_action(|span: StageSpan| {
///     let time = span.end.duration_since(span.begin)?;
///     println!("{:?} of micro-batch {}: {time:?}", span.action.kind, span.action.micro_batch);
///     Ok(())
/// });
/// # drop(stage);
/// ```
#[doc(alias = "dg_stage_span")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StageSpan {
    /// The rank that has done it.
    pub rank: u64,
    /// The step of the pipeline: the same number on all ranks.
    pub step: u64,
    /// What it has done.
    pub action: Action,
    /// When it began, by the clock of this machine.
    pub begin: SystemTime,
    /// When it ended.
    pub end: SystemTime,
}

impl TryFrom<raw::RawStageSpan> for StageSpan {
    type Error = Error;

    fn try_from(raw: raw::RawStageSpan) -> Result<Self> {
        let time = |since_1970: i64| {
            let since_1970 = Duration::from_nanos(u64::try_from(since_1970).unwrap_or(0));
            SystemTime::UNIX_EPOCH + since_1970
        };
        Ok(Self {
            rank: raw.rank,
            step: raw.step,
            action: raw.action.try_into()?,
            begin: time(raw.begin_ns),
            end: time(raw.end_ns),
        })
    }
}

/// `DG_ANY_COUNT`.
const ANY_COUNT: i64 = -1;

fn count_of(count: Option<usize>) -> i64 {
    count.map_or(ANY_COUNT, |count| i64::try_from(count).unwrap_or(i64::MAX))
}

/// What a stage of a pipeline computes.
///
/// Its functions run on a thread of the library, one at a time. They may wait and make calls, as a
/// handler may. An error that they return ends the step: it keeps its code, and names stage,
/// micro-batch and worker; a panic is one with `Code::Internal`.
///
/// The tensors that they get come without history, and the graph is the stage's own; it ends with
/// the micro-batch. So a stage must not write to what it is given (which takes an unsafe function),
/// nor keep it with its history; nor write again to what it has returned, before the micro-batch's
/// backward has come, or the evaluation is over.
///
/// Forward and loss run in torch's modes (autocast, inference mode) of the thread that called
/// [`train`](Pipeline::train) or [`evaluate`](Pipeline::evaluate), but with the gradient mode that
/// the step needs: on in `train`. [`step`](PipelineStage::step) and
/// [`on_action`](PipelineStage::on_action) run in the modes of a new thread, without autocast and
/// with gradient mode on.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{PipelineStage, PipelineStages, Tensor};
/// let weight = Tensor::randn(&[10, 64])?.require_grad()?;
/// let own = weight.clone();
/// let last = PipelineStage::new(1, move |batch| Ok([batch.input(0)?.linear(&own, None)?]))
///     .loss(|batch| Ok(batch.output(0)?.cross_entropy_loss(batch.target(0)?)?))
///     .recompute(true); // keeps no activations until the backward
/// let stages = PipelineStages::new(worker, "model", [last])?;
/// # drop(stages);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_stage")]
pub struct PipelineStage {
    number: u64,
    closures: StageClosures,
    inputs: Option<usize>,
    targets: Option<usize>,
    recompute: bool,
    tied: Vec<(String, Tensor)>,
    skips: Vec<u64>,
}

impl PipelineStage {
    /// Creates a stage of that number in the pipeline, from 0: `forward` returns, from the inputs,
    /// what the next stage gets, each a `Tensor` or an `Option<Tensor>`.
    pub fn new<F, O>(number: u64, mut forward: F) -> Self
    where
        F: FnMut(&MicroBatch) -> std::result::Result<O, BoxedError> + Send + 'static,
        O: IntoIterator<Item: Into<Option<Tensor>>>,
    {
        let forward = move |micro_batch: &MicroBatch| {
            Ok(forward(micro_batch)?.into_iter().map(Into::into).collect())
        };
        Self {
            number,
            closures: StageClosures {
                forward: Box::new(forward),
                loss: None,
                step: None,
                on_action: None,
            },
            inputs: Some(1),
            targets: Some(1),
            recompute: false,
            tied: Vec::new(),
            skips: Vec::new(),
        }
    }

    /// Sets the loss of the last stage: of a micro-batch, a tensor of one element, from its outputs
    /// and targets. With a backward it is real.
    pub fn loss<F>(mut self, loss: F) -> Self
    where
        F: FnMut(&MicroBatch) -> std::result::Result<Tensor, BoxedError> + Send + 'static,
    {
        self.closures.loss = Some(Box::new(loss));
        self
    }
    /// Sets what [`ActionKind::Step`] does, where a schedule has it ([`Schedule::with_steps`]; else
    /// nothing calls this): with the context of the step,
    /// which has this stage's gradients, for a [local optimizer](crate::Sgd::create_local). A step
    /// that writes to parameters itself needs a [`NoGrad`](crate::NoGrad), as gradient mode is on.
    /// Without it a step of such a schedule is refused with `Code::FailedPrecondition`.
    pub fn step<F>(mut self, step: F) -> Self
    where
        F: FnMut(&Context<'_>) -> std::result::Result<(), BoxedError> + Send + 'static,
    {
        self.closures.step = Some(Box::new(step));
        self
    }
    /// Sets what is told of each action of this stage, after it.
    /// [`Worker::start_trace`] needs none.
    pub fn on_action<F>(mut self, on_action: F) -> Self
    where
        F: FnMut(StageSpan) -> std::result::Result<(), BoxedError> + Send + 'static,
    {
        self.closures.on_action = Some(Box::new(on_action));
        self
    }
    /// Sets how many inputs forward takes; with any other number the step fails, and it is not
    /// called. `None`: any number. Default: 1.
    #[doc(alias = "DG_ANY_COUNT")]
    pub fn inputs(mut self, count: Option<usize>) -> Self {
        self.inputs = count;
        self
    }
    /// Sets how many targets the loss takes, as [`inputs`](PipelineStage::inputs). Default: 1.
    pub fn targets(mut self, count: Option<usize>) -> Self {
        self.targets = count;
        self
    }
    /// Runs forward and loss a second time, in the backward (activation checkpointing): until then
    /// a micro-batch keeps what the stage was given, and no activations. The second run draws the
    /// random numbers of the first from torch's default generators; the step fails if another
    /// thread of the process has drawn from these meanwhile. Default: false.
    #[doc(alias = "DG_PIPELINE_STAGE_RECOMPUTE")]
    pub fn recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }
    /// Names a parameter that other stages have as well, on whichever worker, under the same name
    /// there: the embedding of the first stage and the scores of the last, for instance. When a
    /// rank's backwards are done it waits for those of the other ranks that have one of its names,
    /// and each of them has the sum of all their gradients then. Those of one name have the same
    /// shape, dtype and device, and, to stay the same, the same first values and the same optimizer.
    /// With steps in flight ([`Pipeline::start`]) ranks of one worker must not have one tensor for it.
    pub fn tied(mut self, name: impl Into<String>, parameter: &Tensor) -> Self {
        self.tied.push((name.into(), parameter.clone()));
        self
    }
    /// Sets the stages to which the last outputs of forward skip, one for each: with `[3, 2]` the
    /// last but one goes straight to stage 3, and the last to stage 2, and the next stage gets those
    /// before. Each is later than the next stage; it gets the tensors that skip to it behind those
    /// of the stage before it, by the number of the stage that they come from, and they count among
    /// its [`inputs`](PipelineStage::inputs). Their gradients come back as straight. Default: none.
    pub fn skips(mut self, to: impl Into<Vec<u64>>) -> Self {
        self.skips = to.into();
        self
    }
}

impl fmt::Debug for PipelineStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PipelineStage({})", self.number)
    }
}

/// The options of [`PipelineStages`], each with a default.
///
/// ```
/// # fn f(worker: &distgrad::Worker, averager: &distgrad::GradientAverager,
/// #      stage: distgrad::PipelineStage) -> distgrad::Result<()> {
/// use distgrad::PipelineStagesOptions;
/// // A replica's: its gradients are averaged with those of the other replicas, within the step.
/// let stages = PipelineStagesOptions::new().averager(averager).create(worker, "model", [stage])?;
/// # drop(stages);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_stages_options")]
#[derive(Clone, Copy, Debug, Default)]
pub struct PipelineStagesOptions<'a> {
    num_threads: u64,
    averager: Option<&'a GradientAverager>,
}

impl<'a> PipelineStagesOptions<'a> {
    /// All default.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets how many threads an operator of a stage may use. Default, and for 0: as many as
    /// [`num_threads`](crate::num_threads) says on the thread that creates the stages, when it does
    /// (a later [`set_num_threads`](crate::set_num_threads) does not reach them), but where the
    /// machine has several workers, or this one has several ranks, no more than
    /// the processors give to each rank of each of them. Set it where each worker was given
    /// processors of its own, which that would divide once more.
    pub fn num_threads(mut self, count: u64) -> Self {
        self.num_threads = count;
        self
    }
    /// Averages the gradients of these stages over the replicas of the pipeline, in each
    /// [`train`](Pipeline::train): an averager of the parameters that they train, over the workers
    /// that have these stages in each replica; the stages keep what it stands for. A rank averages
    /// when its own backwards are done, while the ranks before it still have some; with one stage it
    /// begins in its last backward. All replicas take the same steps: a step that fails on one, once
    /// it runs, fails the process group, and with it the step of the others. They go on with new
    /// groups, averagers and stages, from the last checkpoint. The worker has one rank of a schedule
    /// then, and no other worker of the process has this averager, or the step is refused. Default:
    /// no replicas.
    ///
    /// A step fails with `Code::FailedPrecondition`, which names worker and parameter (by its tied
    /// name, or its dtype and shape), if it has a gradient for a parameter that the averager leaves
    /// out, or for one of a worker that has no averager while another worker of the pipeline has
    /// one: its replicas would drift apart. Frozen parameters need none.
    ///
    /// Each replica counts the same, however many rows its part of the batch has; so with losses
    /// that are means the replicas' parts have to be of one size for the mean of the whole batch.
    /// Where they are not, let the loss be the sum over the rows times the number of replicas,
    /// divided by the rows of all of them, with [`Reduction::Sum`].
    pub fn averager(mut self, averager: &'a GradientAverager) -> Self {
        self.averager = Some(averager);
        self
    }

    /// Lets the pipelines of that name, of whichever worker of the job, use these stages.
    ///
    /// `Code::AlreadyExists` if the worker has some of that name; `Code::InvalidArgument` for a
    /// name of more than 900 bytes or with a `::` in it, and for two stages of one number.
    #[doc(alias = "dg_pipeline_stages_create")]
    pub fn create<'w>(
        &self,
        worker: &'w Worker,
        name: &str,
        stages: impl IntoIterator<Item = PipelineStage>,
    ) -> Result<PipelineStages<'w>> {
        let stages: Vec<PipelineStage> = stages.into_iter().collect();
        let tied: Vec<Vec<TensorHandle>> = stages
            .iter()
            .map(|stage| stage.tied.iter().map(|(_, parameter)| parameter.handle()).collect())
            .collect();
        let raw: Vec<_> = stages
            .iter()
            .zip(&tied)
            .map(|(stage, tied)| raw::RawStage {
                number: stage.number,
                has_loss: stage.closures.loss.is_some(),
                has_step: stage.closures.step.is_some(),
                has_on_action: stage.closures.on_action.is_some(),
                inputs: count_of(stage.inputs),
                targets: count_of(stage.targets),
                flags: stage.recompute.into(),
                tied_names: stage.tied.iter().map(|(name, _)| name.clone()).collect(),
                tied,
                skips: stage.skips.clone(),
            })
            .collect();
        // The parameters live until the library has them.
        let (closures, _tied): (Vec<_>, Vec<_>) =
            stages.into_iter().map(|stage| (stage.closures, stage.tied)).unzip();
        let table = StageTable::new(closures);
        let (worker, count) = (worker.handle(), self.num_threads);
        let averager = self.averager.map_or(AveragerHandle::NULL, GradientAverager::handle);
        let handle = raw::pipeline_stages_create(worker, name, &raw, table, count, averager)?;
        Ok(PipelineStages { _handle: Owned::new(handle), lifetime: PhantomData })
    }
}

/// The stages of a pipeline that a worker has.
///
/// Dropping it takes them off, and waits until none of their functions runs, for at most a minute:
/// what still runs then is logged, and only the worker's end waits for it. In one of these functions
/// it does not wait. A step that runs fails with `Code::Cancelled`.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{PipelineStage, PipelineStages};
/// use std::time::Duration;
/// let first = PipelineStage::new(0, |batch| Ok([batch.input(0)?.relu()?]));
/// let stages = PipelineStages::new(worker, "model", [first])?;
/// worker.barrier(Duration::from_secs(60))?; // all workers have theirs: steps may begin
/// worker.serve()?; // until the job ends
/// drop(stages);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_stages")]
#[doc(alias = "dg_pipeline_stages_destroy")]
pub struct PipelineStages<'w> {
    _handle: Owned<PipelineStagesHandle>,
    lifetime: PhantomData<&'w Worker>,
}

impl<'w> PipelineStages<'w> {
    /// The same as [`PipelineStagesOptions::create`], with all options default.
    pub fn new(
        worker: &'w Worker,
        name: &str,
        stages: impl IntoIterator<Item = PipelineStage>,
    ) -> Result<Self> {
        PipelineStagesOptions::new().create(worker, name, stages)
    }
}

impl fmt::Debug for PipelineStages<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PipelineStages")
    }
}

// ----------------------------------------------------------------------------------- Pipelines

/// What the gradients of a batch are.
///
/// ```
/// # fn f(worker: &distgrad::Worker, schedule: &distgrad::Schedule) -> distgrad::Result<()> {
/// use distgrad::{PipelineOptions, Reduction};
/// // The stages' loss is a sum over the rows, divided by those of the whole batch.
/// let options = PipelineOptions::new().reduction(Reduction::Sum);
/// let pipeline = options.create(worker, "model", schedule, &["worker0", "worker1"])?;
/// # drop(pipeline);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Reduction {
    /// Each micro-batch's loss counts by its part of the batch: where the loss is a mean, the sum is
    /// that of the whole batch.
    #[default]
    Mean = 0,
    /// Of the losses as they are.
    Sum = 1,
}

/// The options of a [`Pipeline`], each with a default.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{PipelineOptions, Reduction, Schedule};
/// let schedule = Schedule::gpipe(2, 4)?;
/// let pipeline = PipelineOptions::new()
///     .reduction(Reduction::Sum)
///     .create(worker, "model", &schedule, &["worker0", "worker1"])?;
/// # drop(pipeline);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_options")]
#[derive(Clone, Copy, Debug, Default)]
pub struct PipelineOptions {
    reduction: Reduction,
}

impl PipelineOptions {
    /// All default.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets what the gradients of a batch are. Default: [`Reduction::Mean`].
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Creates a pipeline over the stages of that name, with the worker of each rank of the
    /// schedule; one may be there several times, and `worker`, which runs the steps, need not be
    /// among them.
    ///
    /// `Code::InvalidArgument` for another number of workers than the schedule has ranks.
    #[doc(alias = "dg_pipeline_create")]
    pub fn create<'w>(
        &self,
        worker: &'w Worker,
        name: &str,
        schedule: &Schedule,
        workers: &[&str],
    ) -> Result<Pipeline<'w>> {
        let handle = raw::pipeline_create(
            worker.handle(),
            name,
            schedule.0.get(),
            workers,
            self.reduction as u64,
        )?;
        Ok(Pipeline { handle: Owned::new(handle), lifetime: PhantomData })
    }
}

/// Runs batches through the stages of a pipeline.
///
/// ```
/// use distgrad::{Pipeline, PipelineStage, PipelineStages, Schedule, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let store = std::env::temp_dir().join(format!("distgrad-pipe-{}", std::process::id()));
/// # let rendezvous = format!("file://{}", store.display());
/// # let worker = distgrad::WorkerOptions::new().name("alone").rank(0, 1).rendezvous(rendezvous).create()?;
/// // Both stages are on one worker here; usually each worker of a job has its own.
/// let weight = Tensor::from_slice(&[1.0f32, -1.0], &[2, 1])?.require_grad()?;
/// let own = weight.clone();
/// let stages = PipelineStages::new(
///     &worker,
///     "model",
///     [
///         PipelineStage::new(0, move |batch| Ok([batch.input(0)?.matmul(&own)?])),
///         PipelineStage::new(1, |batch| Ok([batch.input(0)?.square()?]))
///             .loss(|batch| Ok(batch.output(0)?.mse_loss(batch.target(0)?)?)),
///     ],
/// )?;
///
/// let schedule = Schedule::one_forward_one_backward(2, 2)?; // two stages, two micro-batches
/// let pipeline = Pipeline::new(&worker, "model", &schedule, &["alone", "alone"])?;
/// let images = Tensor::from_slice(&[1.0f32, 0.0, 0.0, 1.0, 2.0, 1.0], &[3, 2])?;
/// let labels = Tensor::from_slice(&[1.0f32, 0.0, 1.0], &[3, 1])?;
/// let context = worker.context()?;
/// let result = pipeline.train(&context, &[&images], &[&labels])?;
/// assert_eq!(result.losses.len(), 2);
/// assert_eq!(context.gradient(&weight)?.shape(), [2, 1]); // for an optimizer's step
/// # drop((context, pipeline, stages));
/// # let _ = std::fs::remove_file(store);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline")]
#[doc(alias = "dg_pipeline_destroy")]
pub struct Pipeline<'w> {
    handle: Owned<PipelineHandle>,
    lifetime: PhantomData<&'w Worker>,
}

impl<'w> Pipeline<'w> {
    /// The same as [`PipelineOptions::create`], with all options default.
    pub fn new(
        worker: &'w Worker,
        name: &str,
        schedule: &Schedule,
        workers: &[&str],
    ) -> Result<Self> {
        PipelineOptions::new().create(worker, name, schedule, workers)
    }

    /// Runs a batch forward and backward, and waits. Afterwards each worker has the gradients of its
    /// stages in the context, added to what was there, as after
    /// [`Context::backward`]: for an [`Optimizer`](crate::Optimizer), for clipping, for an
    /// [average](crate::GradientAverager).
    ///
    /// The first dimension of each tensor is the batch; it is cut into as many micro-batches as the
    /// schedule has, of which the first may have one element more than the others. The first stage
    /// gets the inputs, the last one's loss the targets. `Code::InvalidArgument` for a batch with
    /// fewer elements than micro-batches, and for a tensor that requires grad: no gradient goes back
    /// to it.
    ///
    /// An error of a stage keeps its code, and names stage, micro-batch and worker; that of the
    /// deadline (`Code::DeadlineExceeded`) what each rank was doing. The first error ends the step
    /// on all ranks, and the context is good for [`release`](Context::release) only. Besides:
    /// `Code::FailedPrecondition` while another step runs on one of the stages, of this pipeline or
    /// of another (of two that begin at one moment one runs), and for a gradient that replicas do
    /// not average ([`PipelineStagesOptions::averager`]); `Code::NotFound` for a stage that its
    /// worker does not have; `Code::Unavailable` if a worker is lost; `Code::Cancelled` by the end
    /// of stages or of this worker.
    ///
    /// Where the schedule has steps of the optimizer ([`ActionKind::Step`]), no stage begins its own
    /// any more once this has returned an error, and one that was in it has ended; the error says
    /// which stages have stepped. It waits for that until the deadline, or, where that is the
    /// default, for another timeout of the worker's options; once the deadline has passed, for 2
    /// seconds. For a worker that has not answered by then, or is lost, the error says that it does
    /// not know: a step that was in the middle there goes on. For as long it waits for workers that
    /// average over replicas ([`PipelineStagesOptions::averager`]) to fail their averages; one that
    /// has not answered by then is asked again before the next step, which fails if it does not
    /// answer then, either. Where a worker did not know the step any more, the next one fails with
    /// `Code::FailedPrecondition` while that worker still has the averager that it had then: make
    /// averager and stages anew.
    ///
    /// `Code::ResourceExhausted` may also mean that the step was taken, and that there was no memory
    /// to hand over its losses.
    #[doc(alias = "dg_pipeline_train")]
    pub fn train(
        &self,
        context: &Context<'_>,
        inputs: &[&Tensor],
        targets: &[&Tensor],
    ) -> Result<PipelineResult> {
        self.train_with(context, inputs, targets, &PipelineRunOptions::new())
    }
    /// The same, with options.
    pub fn train_with(
        &self,
        context: &Context<'_>,
        inputs: &[&Tensor],
        targets: &[&Tensor],
        options: &PipelineRunOptions,
    ) -> Result<PipelineResult> {
        let (_inputs, inputs) = handles_of(inputs.iter().copied());
        let (_targets, targets) = handles_of(targets.iter().copied());
        let (pipeline, timeout) = (self.handle.get(), milliseconds_or_default(options.timeout));
        let handle = raw::pipeline_train(pipeline, context.handle(), &inputs, &targets, timeout)?;
        PipelineResult::take(Owned::new(handle))
    }

    /// Starts a step as [`train`](Pipeline::train) does, and waits until all ranks know of it, but
    /// not for its end. It may be started while others of this pipeline run, and then comes behind
    /// them on each rank: so one rank may begin with it while others are still in the step before,
    /// and nobody is idle between the two. A rank goes through its whole list before it begins the
    /// next step's. So where the schedule has the optimizer's steps ([`ActionKind::Step`]) the
    /// gradients and parameters are those of [`train`](Pipeline::train), called once for each batch,
    /// to the last bit. Where it has none, each step starts from the parameters as they are then;
    /// which is good for gradients that are to be added up
    /// ([`Worker::sum_gradients`](crate::Worker::sum_gradients)).
    ///
    /// If a step fails, those that were started behind it fail, too, with `Code::FailedPrecondition`
    /// or its error; what any of them has done by then its own error says. Nobody may write to the
    /// tensors, as an operator in place does, before the step has ended: they are not copied. Keep
    /// the context until [`wait`](PipelineStep::wait) has returned: when it is
    /// [released](Context::release), or dropped, the gradients are gone, and an optimizer's step
    /// that wants them fails. `Code::FailedPrecondition` if one that runs has failed already, for a
    /// ninth step that nobody has waited for, and while another thread is in this function.
    ///
    /// ```
    /// # use distgrad::{Context, Pipeline, PipelineStep, Tensor, Worker};
    /// # fn f(worker: &Worker, pipeline: &Pipeline, batches: &[(Tensor, Tensor)])
    /// #     -> distgrad::Result<()> {
    /// use std::collections::VecDeque;
    /// let mut in_flight: VecDeque<(Context, PipelineStep)> = VecDeque::new();
    /// for (images, labels) in batches {
    ///     let context = worker.context()?;
    ///     let step = pipeline.start(&context, &[images], &[labels])?;
    ///     in_flight.push_back((context, step));
    ///     if in_flight.len() == 2 {
    ///         let (_context, step) = in_flight.pop_front().unwrap();
    ///         println!("{:?}", step.wait()?.loss);
    ///     }
    /// }
    /// for (_context, step) in in_flight {
    ///     println!("{:?}", step.wait()?.loss);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_pipeline_start")]
    pub fn start(
        &self,
        context: &Context<'_>,
        inputs: &[&Tensor],
        targets: &[&Tensor],
    ) -> Result<PipelineStep<'w>> {
        self.start_with(context, inputs, targets, &PipelineRunOptions::new())
    }
    /// The same, with options.
    pub fn start_with(
        &self,
        context: &Context<'_>,
        inputs: &[&Tensor],
        targets: &[&Tensor],
        options: &PipelineRunOptions,
    ) -> Result<PipelineStep<'w>> {
        let (_inputs, inputs) = handles_of(inputs.iter().copied());
        let (_targets, targets) = handles_of(targets.iter().copied());
        let (pipeline, timeout) = (self.handle.get(), milliseconds_or_default(options.timeout));
        let handle = raw::pipeline_start(pipeline, context.handle(), &inputs, &targets, timeout)?;
        Ok(PipelineStep { handle: Owned::new(handle), lifetime: PhantomData })
    }

    /// Runs a batch forward alone, without gradients; with losses where there are targets. Errors as
    /// of [`train`](Pipeline::train).
    ///
    /// ```
    /// # fn f(pipeline: &distgrad::Pipeline, images: &distgrad::Tensor) -> distgrad::Result<()> {
    /// let result = pipeline.evaluate(&[images], &[])?; // without targets there is no loss
    /// for scores in result.outputs.iter().flatten().flatten() {
    ///     println!("{:?}", scores.argmax(1)?.to_vec::<i64>()?); // of a micro-batch
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_pipeline_evaluate")]
    pub fn evaluate(&self, inputs: &[&Tensor], targets: &[&Tensor]) -> Result<PipelineResult> {
        self.evaluate_with(inputs, targets, &PipelineRunOptions::new())
    }
    /// The same, with options.
    pub fn evaluate_with(
        &self,
        inputs: &[&Tensor],
        targets: &[&Tensor],
        options: &PipelineRunOptions,
    ) -> Result<PipelineResult> {
        let (_inputs, inputs) = handles_of(inputs.iter().copied());
        let (_targets, targets) = handles_of(targets.iter().copied());
        let (pipeline, timeout) = (self.handle.get(), milliseconds_or_default(options.timeout));
        let handle = raw::pipeline_evaluate(pipeline, &inputs, &targets, timeout)?;
        PipelineResult::take(Owned::new(handle))
    }
}

impl fmt::Debug for Pipeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pipeline")
    }
}

/// A step that was started ([`Pipeline::start`]), which goes on when its [`Pipeline`] is dropped.
/// Dropping it ends one that nobody has waited for, and those that were started behind it, and waits
/// for that; but not in a closure of a stage, where a thread of the library waits instead.
///
/// ```
/// # use distgrad::{Context, Pipeline, PipelineStep, Tensor};
/// # fn f(pipeline: &Pipeline, context: &Context, images: &Tensor, labels: &Tensor)
/// #     -> distgrad::Result<()> {
/// let step: PipelineStep = pipeline.start(context, &[images], &[labels])?;
/// println!("{:?}", step.wait()?.losses);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_step")]
#[doc(alias = "dg_pipeline_step_destroy")]
#[must_use = "dropping it ends the step"]
pub struct PipelineStep<'w> {
    handle: Owned<PipelineStepHandle>,
    lifetime: PhantomData<&'w Worker>,
}

impl PipelineStep<'_> {
    /// Waits for the step's end, and returns what [`Pipeline::train`] does; its errors, too.
    /// `Code::FailedPrecondition` when the worker has ended; and in a closure of a stage of its
    /// pipeline, for which the step may wait: the step, which nobody has any more, ends then.
    #[doc(alias = "dg_pipeline_step_wait")]
    pub fn wait(self) -> Result<PipelineResult> {
        PipelineResult::take(Owned::new(raw::pipeline_step_wait(self.handle.get())?))
    }
}

impl fmt::Debug for PipelineStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PipelineStep")
    }
}

/// The options of a batch, each with a default.
///
/// ```
/// # fn f(pipeline: &distgrad::Pipeline, context: &distgrad::Context, images: &distgrad::Tensor,
/// #      labels: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::PipelineRunOptions;
/// use std::time::Duration;
/// let options = PipelineRunOptions::new().timeout(Duration::from_secs(10));
/// let result = pipeline.train_with(context, &[images], &[labels], &options)?;
/// # drop(result);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_run_options")]
#[derive(Clone, Copy, Debug, Default)]
pub struct PipelineRunOptions {
    timeout: Option<Duration>,
}

impl PipelineRunOptions {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the timeout, after which it fails with `Code::DeadlineExceeded`. Default: that of the
    /// worker's options.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// What a batch has given.
///
/// ```
/// # fn f(pipeline: &distgrad::Pipeline, context: &distgrad::Context, images: &distgrad::Tensor,
/// #      labels: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::PipelineResult;
/// let result: PipelineResult = pipeline.train(context, &[images], &[labels])?;
/// for (micro_batch, loss) in result.losses.iter().enumerate() {
///     println!("micro-batch {micro_batch}: {}", loss.item::<f32>()?);
/// }
/// if let Some(loss) = result.loss {
///     println!("the batch: {}", loss.item::<f32>()?);
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_pipeline_result")]
#[derive(Debug)]
#[non_exhaustive]
pub struct PipelineResult {
    /// The loss of each micro-batch. Empty in an evaluation without targets.
    #[doc(alias = "dg_pipeline_result_losses")]
    pub losses: Vec<Tensor>,
    /// The loss of the batch: their sum, or their mean ([`Reduction`]). `None` if there are none.
    #[doc(alias = "dg_pipeline_result_loss")]
    pub loss: Option<Tensor>,
    /// What the last stage has given, by micro-batch. Of an evaluation alone.
    #[doc(alias = "dg_pipeline_result_output_count")]
    #[doc(alias = "dg_pipeline_result_outputs")]
    pub outputs: Vec<Vec<Option<Tensor>>>,
}

impl PipelineResult {
    fn take(handle: Owned<PipelineResultHandle>) -> Result<Self> {
        let result = handle.get();
        let losses = Message::own(raw::pipeline_result_losses(result)?).tensors()?;
        let outputs = (0..raw::pipeline_result_output_count(result))
            .map(|m| Message::own(raw::pipeline_result_outputs(result, m)?).tensors());
        Ok(Self {
            losses: losses.into_iter().flatten().collect(), // none of them is without a tensor
            loss: Tensor::own_or_none(raw::pipeline_result_loss(result)?),
            outputs: outputs.collect::<Result<_>>()?,
        })
    }
}
