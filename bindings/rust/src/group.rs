//! Processes that compute the same thing together.
use crate::{
    ffi::{self, AveragerHandle, Owned, ProcessGroupHandle, RawProcessGroupOptions},
    future::milliseconds_or_default,
    message::handles_of,
    Context, Error, Result, Tensor, Worker,
};
use std::{borrow::Borrow, fmt, time::Duration};

/// How the ranks of a [`ProcessGroup`] meet. What is not said has a default.
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
    /// All workers of the job, each by its rank, with Gloo.
    pub fn new() -> Self {
        Self::default()
    }
    /// No two groups of a job have the same at a time. Default: `default`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Its number, below `size`, which is how many ranks the group has. Default: all workers of the
    /// job, each by its rank.
    pub fn rank(mut self, rank: u32, size: u32) -> Self {
        (self.rank, self.size) = (rank, size);
        self
    }
    /// `gloo`, for the CPU; `nccl`, where the library was built with CUDA. Default: `gloo`.
    pub fn backend(mut self, backend: impl Into<String>) -> Self {
        self.backend = backend.into();
        self
    }
    /// The address, name or interface of this machine at which the others reach it by Gloo, which
    /// knows no cluster key. Default: what the worker listens on.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = host.into();
        self
    }
    /// Of each collective. Default: ten minutes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
    /// For all ranks to come. Default: ten minutes.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = Some(timeout);
        self
    }

    /// Waits until all ranks have called it. They meet by way of the worker's job, and need the
    /// worker no more. `Code::DeadlineExceeded` names those that have not come.
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

/// Processes that compute the same thing together, each with its own part of the data: each is one
/// rank of a group, and all call the same functions of it in the same order.
///
/// An error of one of these is the result of all later ones too, but for arguments that are wrong:
/// then make a new group.
#[doc(alias = "dg_process_group")]
#[doc(alias = "dg_process_group_destroy")]
pub struct ProcessGroup(Owned<ProcessGroupHandle>);

impl ProcessGroup {
    /// Its number in the group.
    #[doc(alias = "dg_process_group_rank")]
    pub fn rank(&self) -> u32 {
        ffi::process_group_rank(self.0.get())
    }

    /// How many ranks the group has.
    #[doc(alias = "dg_process_group_size")]
    pub fn size(&self) -> u32 {
        ffi::process_group_size(self.0.get())
    }

    /// In place: each tensor becomes the average of those of all ranks, which have the same shapes
    /// and dtypes there (that is not checked). Waits for all ranks.
    ///
    /// `Code::InvalidArgument`, before anything begins, for tensors that are not of a floating or
    /// complex dtype (of 16 bits or more for each number; complex ones of 32 or more).
    #[doc(alias = "dg_process_group_average")]
    pub fn average(&self, tensors: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Result<()> {
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::process_group_average(self.0.get(), &handles)?)
    }

    /// In place: each tensor, of any dtype, becomes that of the rank `root`. Otherwise as
    /// [`average`](ProcessGroup::average).
    #[doc(alias = "dg_process_group_broadcast")]
    pub fn broadcast(
        &self,
        tensors: impl IntoIterator<Item = impl Borrow<Tensor>>,
        root: u32,
    ) -> Result<()> {
        let (_tensors, handles) = handles_of(tensors);
        Ok(ffi::process_group_broadcast(self.0.get(), &handles, root)?)
    }

    /// This rank cannot go on: all later calls of the group fail with the code of `why` and a text
    /// that has its message, those in flight end, and the others fail at once, too, with
    /// `Code::Unavailable` and that message. The first error of a group wins.
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

/// How an [`Averager`] averages. What is not said has a default.
#[doc(alias = "dg_averager_options")]
#[derive(Clone, Debug, Default)]
pub struct AveragerOptions {
    divide_by_active: bool,
    bucket_bytes: u64,
    buffers: Vec<Tensor>,
}

impl AveragerOptions {
    /// Of parameters alone.
    pub fn new() -> Self {
        Self::default()
    }
    /// Divides by the number of ranks that have not [joined](Averager::join), rather than by all.
    /// Default: by all.
    #[doc(alias = "DG_AVERAGER_DIVIDE_BY_ACTIVE")]
    pub fn divide_by_active(mut self, divide: bool) -> Self {
        self.divide_by_active = divide;
        self
    }
    /// Of gradients that go as one, at most. Default: 25 MiB.
    pub fn bucket_bytes(mut self, bytes: u64) -> Self {
        self.bucket_bytes = bytes;
        self
    }
    /// What a model has besides parameters. Default: none.
    pub fn buffers(mut self, buffers: impl IntoIterator<Item = impl Borrow<Tensor>>) -> Self {
        self.buffers = buffers.into_iter().map(|buffer| buffer.borrow().clone()).collect();
        self
    }

    /// Every rank gives the same parameters and buffers but for their values, and gets those of rank
    /// 0. Waits for all ranks.
    ///
    /// `Code::InvalidArgument`, on every rank, names the first one that differs.
    #[doc(alias = "dg_averager_create")]
    pub fn create(
        &self,
        group: &ProcessGroup,
        parameters: impl IntoIterator<Item = impl Borrow<Tensor>>,
    ) -> Result<Averager> {
        let (_parameters, parameters) = handles_of(parameters);
        let (_buffers, buffers) = handles_of(&self.buffers);
        Ok(Averager(Owned::new(ffi::averager_create(
            group.0.get(),
            &parameters,
            &buffers,
            self.bucket_bytes,
            self.divide_by_active,
        )?)))
    }
}

/// Averages the gradients of a list of parameters over the ranks of a group, step for step.
#[doc(alias = "dg_averager")]
#[doc(alias = "dg_averager_destroy")]
pub struct Averager(Owned<AveragerHandle>);

impl Averager {
    /// Averages the gradients that a context has for the parameters, between its backward and the
    /// step of an optimizer; each rank has a context of its own. A parameter that no rank has a
    /// gradient of is left out. Waits for all ranks.
    #[doc(alias = "dg_averager_average")]
    pub fn average(&self, context: &Context<'_>) -> Result<()> {
        Ok(ffi::averager_average(self.0.get(), context.handle())?)
    }

    /// Before the backward of a context, the only one that it will have: its averages begin as its
    /// gradients come, and [`average`](Averager::average) ends them; nobody else changes the
    /// gradients until then.
    ///
    /// Ranks need not do alike. One context at a time, and one averager for each: any other average,
    /// and the context's release, gives this one up, and that is an error of all ranks if averages
    /// of it have begun.
    #[doc(alias = "dg_averager_average_in_backward")]
    pub fn average_in_backward(&self, context: &Context<'_>) -> Result<()> {
        Ok(ffi::averager_average_in_backward(self.0.get(), context.handle())?)
    }

    /// For a rank that has run out of data while others have not: takes part in their next
    /// [`average`](Averager::average) with a context of its own, which has no gradients of the
    /// parameters. Waits for all ranks.
    ///
    /// `true`: the context has the averages, and an optimizer of this rank takes the same step with
    /// them as those of the others do, so that it keeps the same state. `false`: all ranks have
    /// called it, and have the parameters and buffers of the lowest rank that was the last to go on.
    ///
    /// ```no_run
    /// # fn f(worker: &distgrad::Worker, averager: &distgrad::Averager,
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
    #[doc(alias = "dg_averager_join")]
    pub fn join(&self, context: &Context<'_>) -> Result<bool> {
        Ok(ffi::averager_join(self.0.get(), context.handle(), false)?)
    }

    /// As [`join`](Averager::join), for the second average of a step and those after it: the context
    /// has the gradients of earlier averages, as those of the other ranks have.
    #[doc(alias = "DG_AVERAGER_JOIN_KEEP_GRADIENTS")]
    pub fn join_keeping_gradients(&self, context: &Context<'_>) -> Result<bool> {
        Ok(ffi::averager_join(self.0.get(), context.handle(), true)?)
    }
}

impl fmt::Debug for Averager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Averager")
    }
}
