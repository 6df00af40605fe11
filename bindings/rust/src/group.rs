//! Process groups, and the average of gradients over them.
use crate::{
    ffi::{self, AveragerHandle, Owned, ProcessGroupHandle, RawProcessGroupOptions},
    future::milliseconds_or_default,
    message::handles_of,
    Context, Error, Result, Tensor, Worker,
};
use std::{borrow::Borrow, fmt, time::Duration};

/// The options of a [`ProcessGroup`], each with a default.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Dtype, ProcessGroupOptions, Tensor};
/// let group = ProcessGroupOptions::new().name("replicas").create(worker)?; // on all workers
/// let x = Tensor::full(&[2], f64::from(group.rank()), Dtype::FLOAT32)?;
/// group.average([&x])?; // in place: the same on all ranks
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_process_group_options")]
#[derive(Clone, Debug, Default)]
pub struct ProcessGroupOptions {
    name: String,
    rank: u32,
    size: u32,
    backend: String,
    host: String,
    timeout: Option<Duration>,
    join_timeout: Option<Duration>,
}

impl ProcessGroupOptions {
    /// All default: all workers of the job, each by its rank, with Gloo.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the name, unique among the groups of a job at a time. Default: `default`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Sets this process's rank, below `size`, the number of ranks. Default: all workers of the
    /// job, each by its rank.
    pub fn rank(mut self, rank: u32, size: u32) -> Self {
        (self.rank, self.size) = (rank, size);
        self
    }
    /// Sets the backend: `gloo`, for the CPU, or `nccl`, in builds with CUDA. Default: `gloo`.
    pub fn backend(mut self, backend: impl Into<String>) -> Self {
        self.backend = backend.into();
        self
    }
    /// Sets the address, name or interface for Gloo to listen on. Default: that of the worker. With
    /// the worker's key or certificates, which the group takes, what Gloo sends is encrypted, but
    /// not what NCCL sends.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = host.into();
        self
    }
    /// Sets the timeout of each collective. Default: ten minutes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
    /// Sets the timeout for all ranks to join. Default: ten minutes.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = Some(timeout);
        self
    }

    /// Creates the group. Its ranks find each other through the worker's job, and do not need the
    /// worker afterwards. Waits until all ranks have called it; `Code::DeadlineExceeded` names
    /// those that have not.
    #[doc(alias = "dg_process_group_create")]
    pub fn create(&self, worker: &Worker) -> Result<ProcessGroup> {
        let options = RawProcessGroupOptions {
            name: &self.name,
            rank: self.rank,
            size: self.size,
            backend: &self.backend,
            host: &self.host,
            timeout_ms: milliseconds_or_default(self.timeout),
            join_timeout_ms: milliseconds_or_default(self.join_timeout),
        };
        Ok(ProcessGroup(Owned::new(ffi::process_group_create(worker.handle(), &options)?)))
    }
}

/// Processes that compute the same thing together, each with its own part of the data. Each is one
/// rank of the group, and all call the same functions of it in the same order.
///
/// After an error, but for `Code::InvalidArgument` and one that a function returns before anything
/// begins, all later calls return that error: create a new group.
///
/// ```
/// # fn train(_: &distgrad::ProcessGroup) -> distgrad::Result<()> { Ok(()) }
/// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::{ProcessGroup, ProcessGroupOptions};
/// let group: ProcessGroup = ProcessGroupOptions::new().create(worker)?; // on all workers
/// println!("rank {} of {}", group.rank(), group.size());
/// group.broadcast([weight], 0)?; // the values of rank 0
/// if let Err(error) = train(&group) {
///     group.fail(&error)?; // the others hear why, and do not wait for this rank
///     return Err(error);
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_process_group")]
#[doc(alias = "dg_process_group_destroy")]
pub struct ProcessGroup(Owned<ProcessGroupHandle>);

impl ProcessGroup {
    /// Returns this process's rank in the group.
    #[doc(alias = "dg_process_group_rank")]
    pub fn rank(&self) -> u32 {
        ffi::process_group_rank(self.0.get())
    }

    /// Returns how many ranks the group has.
    #[doc(alias = "dg_process_group_size")]
    pub fn size(&self) -> u32 {
        ffi::process_group_size(self.0.get())
    }

    /// Averages in place (an all-reduce): each tensor becomes the average of those of all ranks,
    /// which have to have the same shapes and dtypes (this is not checked). Waits for all ranks.
    ///
    /// `Code::InvalidArgument`, before anything begins, unless all are of `FLOAT16`, `FLOAT32`,
    /// `FLOAT64`, `BFLOAT16`, `COMPLEX64` or `COMPLEX128`.
    #[doc(alias = "dg_process_group_average")]
    pub fn average(&self, tensors: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Result<()> {
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::process_group_average(self.0.get(), &handles)?)
    }

    /// Broadcasts in place: each tensor, of any dtype, becomes that of the rank `root`. Otherwise
    /// as [`average`](ProcessGroup::average).
    #[doc(alias = "dg_process_group_broadcast")]
    pub fn broadcast(
        &self,
        tensors: impl IntoIterator<Item = impl Borrow<Tensor>>,
        root: u32,
    ) -> Result<()> {
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::process_group_broadcast(self.0.get(), &handles, root)?)
    }

    /// Tells the group that this rank cannot go on. All later calls of the group here fail with the
    /// code of `why` and a text that contains its message, those in flight end, and the other ranks
    /// fail with `Code::Unavailable` and that message, at once, or with NCCL within a second or two.
    /// The first error of a group wins. Waits for the job's store, which tells the others; some
    /// seconds at most.
    #[doc(alias = "dg_process_group_fail")]
    pub fn fail(&self, why: &Error) -> Result<()> {
        Ok(ffi::process_group_fail(self.0.get(), why.code() as i32, why.message())?)
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGroup({} of {})", self.rank(), self.size())
    }
}

/// The options of a [`GradientAverager`], each with a default.
///
/// ```
/// # fn f(worker: &distgrad::Worker, weight: &distgrad::Tensor, loss: &distgrad::Tensor,
/// #      optimizer: &distgrad::Optimizer<'_>) -> distgrad::Result<()> {
/// use distgrad::{GradientAveragerOptions, ProcessGroupOptions};
/// let group = ProcessGroupOptions::new().create(worker)?;
/// let averager = GradientAveragerOptions::new().create(&group, [weight])?; // values of rank 0
/// let context = worker.context()?; // one step
/// averager.average_in_backward(&context)?;
/// context.backward([loss])?;
/// averager.average(&context)?;
/// optimizer.step(&context)?; // the same on all ranks
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_gradient_averager_options")]
#[derive(Clone, Debug, Default)]
pub struct GradientAveragerOptions {
    divide_by_active: bool,
    bucket_bytes: u64,
    buffers: Vec<Tensor>,
}

impl GradientAveragerOptions {
    /// All default, without buffers.
    pub fn new() -> Self {
        Self::default()
    }
    /// Divides by the number of ranks that have not [joined](GradientAverager::join), rather than by
    /// all. Default: by all.
    #[doc(alias = "DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE")]
    pub fn divide_by_active(mut self, divide: bool) -> Self {
        self.divide_by_active = divide;
        self
    }
    /// Sets the size of the largest bucket of gradients. Default: 25 MiB.
    pub fn bucket_bytes(mut self, bytes: u64) -> Self {
        self.bucket_bytes = bytes;
        self
    }
    /// Sets the model's tensors besides its parameters. Default: none.
    pub fn buffers(mut self, buffers: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Self {
        self.buffers = buffers.into_iter().map(|buffer| buffer.borrow().clone()).collect();
        self
    }

    /// Creates an averager, with the same parameters and buffers on every rank but for their
    /// values, which become those of rank 0. A parameter that does not require grad now (a frozen
    /// one) is left out of all averages; once it requires grad averages fail on every rank, with
    /// an error that names it. Waits for all ranks.
    ///
    /// `Code::InvalidArgument`, on every rank, names the first tensor that differs.
    #[doc(alias = "dg_gradient_averager_create")]
    pub fn create(
        &self,
        group: &ProcessGroup,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<GradientAverager> {
        let (_parameters, parameters) = handles_of(parameters);
        let (_buffers, buffers) = handles_of(&self.buffers);
        Ok(GradientAverager(Owned::new(ffi::averager_create(
            group.0.get(),
            &parameters,
            &buffers,
            self.bucket_bytes,
            self.divide_by_active,
        )?)))
    }
}

/// Averages the gradients of a list of parameters over the ranks of a group, step by step: a
/// bucketed all-reduce, as in PyTorch's DistributedDataParallel.
///
/// ```
/// # fn f(worker: &distgrad::Worker, group: &distgrad::ProcessGroup, weight: &distgrad::Tensor,
/// #      loss: &distgrad::Tensor) -> distgrad::Result<()> {
/// use distgrad::{GradientAverager, GradientAveragerOptions};
/// let averager: GradientAverager = GradientAveragerOptions::new().create(group, [weight])?;
/// let context = worker.context()?; // one step
/// context.backward([loss])?;
/// averager.average(&context)?; // waits for the other ranks
/// println!("the average has the norm {}", context.gradient(weight)?.norm()?.item::<f32>()?);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_gradient_averager")]
#[doc(alias = "dg_gradient_averager_destroy")]
pub struct GradientAverager(Owned<AveragerHandle>);

impl GradientAverager {
    pub(crate) fn handle(&self) -> AveragerHandle {
        self.0.get()
    }

    /// Averages the gradients that a context has for the parameters, between its backward and the
    /// step of an optimizer; each rank has a context of its own. A parameter for which no rank has
    /// a gradient is left out. Waits for all ranks.
    #[doc(alias = "dg_gradient_averager_average")]
    pub fn average(&self, context: &Context<'_>) -> Result<()> {
        Ok(ffi::averager_average(self.0.get(), context.handle())?)
    }

    /// Makes the averages of a context begin during its backward, as the gradients come;
    /// [`average`](GradientAverager::average) then ends them. Call it before that backward, which has
    /// to be the context's only one; nothing else may change the gradients in between. Other ranks
    /// need not do the same. Waits for an average that runs on another thread.
    ///
    /// An averager has one such context at a time, and a context one such averager: any other
    /// average, and the context's release, abandons this one, which is an error of all ranks if its
    /// averages have begun.
    #[doc(alias = "dg_gradient_averager_average_in_backward")]
    pub fn average_in_backward(&self, context: &Context<'_>) -> Result<()> {
        Ok(ffi::averager_average_in_backward(self.0.get(), context.handle())?)
    }

    /// Takes part in the next [`average`](GradientAverager::average) of the other ranks, for a rank
    /// that has run out of data while others have not. It has a context of its own, which has no
    /// gradients of the parameters. Waits for all ranks.
    ///
    /// `true` if the others go on: the context then has the averages, and an optimizer of this rank
    /// takes the same step with them as those of the others do, so that it keeps the same state.
    /// `false` when all ranks have called this; they then have the parameters and buffers of the
    /// lowest rank that was the last to go on.
    ///
    /// ```no_run
    /// # fn f(worker: &distgrad::Worker, averager: &distgrad::GradientAverager,
    /// #      optimizer: &distgrad::Optimizer<'_>) -> distgrad::Result<()> {
    /// loop {
    ///     let context = worker.context()?;
    ///     if !averager.join(&context)? {
    ///         break;
    ///     }
    ///     optimizer.step(&context)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `Code::FailedPrecondition`, before anything begins, if the context has gradients already.
    #[doc(alias = "dg_gradient_averager_join")]
    pub fn join(&self, context: &Context<'_>) -> Result<bool> {
        Ok(ffi::averager_join(self.0.get(), context.handle(), false)?)
    }

    /// As [`join`](GradientAverager::join), for the second average of a step and those after it: the
    /// context has the gradients of earlier averages, as those of the other ranks have.
    #[doc(alias = "DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS")]
    pub fn join_keeping_gradients(&self, context: &Context<'_>) -> Result<bool> {
        Ok(ffi::averager_join(self.0.get(), context.handle(), true)?)
    }
}

impl fmt::Debug for GradientAverager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientAverager")
    }
}
