//! Workers: the members of a job.
use crate::{
    ffi::{self, ContextHandle, Handle, Handler, Owned, RawWorkerOptions, WorkerHandle},
    future::{self, milliseconds, milliseconds_or_default},
    Caller, Code, Context, Error, Message, Request, Result,
};
use std::{fmt, path::Path, time::Duration};

/// How a worker joins a job. What is not said has a default.
#[doc(alias = "dg_worker_options")]
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions {
    name: String,
    rank: u32,
    world_size: u32,
    rendezvous: String,
    transport: String,
    host: String,
    key_file: String,
    thread_count: u64,
    timeout: Option<Duration>,
    join_timeout: Option<Duration>,
    operators: Operators,
    job: String,
    heartbeat_limit: Option<Duration>,
}

/// Which operators the others may call on a worker, without its having registered anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operators {
    /// Those of torch that only compute; docs/security.md has the rule.
    #[default]
    Pure,
    /// None.
    #[doc(alias = "DG_WORKER_NO_OPERATORS")]
    None,
    /// All that this process has.
    #[doc(alias = "DG_WORKER_ALL_OPERATORS")]
    All,
}

impl WorkerOptions {
    /// All default: rank and world size are `RANK` and `WORLD_SIZE` in the environment, where
    /// launchers put them, and so is the rendezvous.
    pub fn new() -> Self {
        Self::default()
    }
    /// Unique in the job. Default: `worker<rank>`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }
    /// Its number, below `world_size`, which is how many workers the job has.
    pub fn rank(mut self, rank: u32, world_size: u32) -> Self {
        (self.rank, self.world_size) = (rank, world_size);
        self
    }
    /// How the workers find each other: `tcp://host:port`, where worker 0 serves a store;
    /// `file:///path`, a file that all see, and that is not there from an earlier job; `env://`
    /// (the default), `MASTER_ADDR` and `MASTER_PORT` as launchers set them.
    pub fn rendezvous(mut self, rendezvous: impl Into<String>) -> Self {
        self.rendezvous = rendezvous.into();
        self
    }
    /// `socket` (the default); `tcp` and `shm` are TensorPipe's own.
    pub fn transport(mut self, transport: impl Into<String>) -> Self {
        self.transport = transport.into();
        self
    }
    /// What it listens on. Default: `127.0.0.1`.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = host.into();
        self
    }
    /// A file with the secret that all workers share. Default: what `DISTGRAD_KEY_FILE` in the
    /// environment names, or none.
    pub fn key_file(mut self, key_file: impl AsRef<Path>) -> Self {
        self.key_file = key_file.as_ref().to_string_lossy().into_owned();
        self
    }
    /// How many handlers run at the same time. Default: one per core.
    pub fn thread_count(mut self, thread_count: u64) -> Self {
        self.thread_count = thread_count;
        self
    }
    /// Of calls and passes that set none. Default: a minute.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
    /// For all workers to join. Default: a minute.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = Some(timeout);
        self
    }
    /// Which operators the others may call here. Default: those that only compute.
    pub fn operators(mut self, operators: Operators) -> Self {
        self.operators = operators;
        self
    }
    /// Tells jobs that share one rendezvous apart; has no `/`. Default: empty.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = job.into();
        self
    }
    /// A peer that was not heard of for so long is lost, though its connection stands. At least
    /// 100 ms; `Duration::MAX`: never. Default: 20 seconds.
    pub fn heartbeat_limit(mut self, limit: Duration) -> Self {
        self.heartbeat_limit = Some(limit);
        self
    }

    /// Joins the job, and waits until all its workers have.
    #[doc(alias = "dg_worker_create")]
    pub fn create(&self) -> Result<Worker> {
        let loaded = ffi::abi_version() >> 16;
        if loaded != ffi::abi_major() {
            return Err(Error::new(
                Code::Unimplemented,
                format!(
                    "libdistgrad has version {loaded} of its interface, not {}",
                    ffi::abi_major()
                ),
            ));
        }
        let handle = ffi::worker_create(&RawWorkerOptions {
            name: &self.name,
            rank: self.rank,
            world_size: self.world_size,
            rendezvous: &self.rendezvous,
            transport: &self.transport,
            host: &self.host,
            key_file: &self.key_file,
            thread_count: self.thread_count,
            timeout_ms: milliseconds_or_default(self.timeout),
            join_timeout_ms: milliseconds_or_default(self.join_timeout),
            flags: match self.operators {
                Operators::Pure => 0,
                Operators::None => 1,
                Operators::All => 2,
            },
            job: &self.job,
            heartbeat_limit_ms: milliseconds_or_default(self.heartbeat_limit),
        })?;
        Ok(Worker(Owned::new(handle)))
    }
}

/// What a handler returns. Any error will do; the code of an [`Error`] reaches the caller.
pub type HandlerResult =
    std::result::Result<Message, Box<dyn std::error::Error + Send + Sync + 'static>>;

/// One member of a job: it listens, calls the others, and is called by them. It owns all its threads
/// and sockets; a process may have several, for tests mostly.
///
/// Dropping it fails what is still under way with `Code::Cancelled`, waits for its handlers, and
/// ends its threads. In a handler or a callback it cannot wait for itself: there an error is logged,
/// and the worker stays. [`leave`](Worker::leave) first, so that nobody's call finds it gone.
///
/// What is made of it may be dropped later: what borrows it cannot be used then, and a
/// [`Future`](crate::Future) ends with an error.
///
/// ```compile_fail,E0505
/// # fn f(worker: distgrad::Worker) -> distgrad::Result<()> {
/// let context = worker.context()?;
/// drop(worker); // the context borrows it
/// context.release()?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_worker")]
pub struct Worker(Owned<WorkerHandle>);

impl Worker {
    pub(crate) fn handle(&self) -> WorkerHandle {
        self.0.get()
    }

    /// Its number in the job.
    #[doc(alias = "dg_worker_rank")]
    pub fn rank(&self) -> u32 {
        ffi::worker_rank(self.handle())
    }

    /// How many workers the job has.
    #[doc(alias = "dg_worker_world_size")]
    pub fn world_size(&self) -> u32 {
        ffi::worker_world_size(self.handle())
    }

    /// The name of the worker with that rank; `None` if there is none.
    #[doc(alias = "dg_worker_name")]
    pub fn name(&self, rank: u32) -> Option<String> {
        Some(ffi::worker_name(self.handle(), rank)).filter(|name| !name.is_empty())
    }

    /// Its number among the workers of its machine, as the launcher says: to choose a device by.
    /// 0 where it says nothing.
    #[doc(alias = "dg_worker_local_rank")]
    pub fn local_rank(&self) -> u32 {
        ffi::worker_local_rank(self.handle())
    }

    /// How many workers its machine has, as the launcher says. 0 where it says nothing.
    #[doc(alias = "dg_worker_local_world_size")]
    pub fn local_world_size(&self) -> u32 {
        ffi::worker_local_world_size(self.handle())
    }

    /// What it has done so far, in Prometheus' text format. docs/metrics.md explains each number.
    #[doc(alias = "dg_worker_metrics_text")]
    pub fn metrics_text(&self) -> Result<String> {
        Ok(Message::own(ffi::worker_metrics_text(self.handle())?).text()?.to_owned())
    }

    /// How many contexts it knows of.
    #[doc(alias = "dg_worker_context_count")]
    pub fn context_count(&self) -> usize {
        ffi::worker_context_count(self.handle())
    }

    /// Lets all workers call `function`.
    ///
    /// The handler runs on threads of the worker, several at once; it may block and make calls
    /// ([`Request::call`]). A panic in it is an error at the caller, with `Code::Internal`. Calls
    /// that come before it is registered are refused, so register before the others may call: before
    /// a [`wait_for_all`](Worker::wait_for_all), for instance. It is dropped with the worker.
    ///
    /// `Code::AlreadyExists` if `function` is registered; `Code::InvalidArgument` if the name is
    /// empty, longer than 1000 bytes, has a `::` or begins with `distgrad.`.
    ///
    /// What a handler uses has to live as long as the worker and be good for several threads:
    ///
    /// ```compile_fail,E0277
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// let count = std::rc::Rc::new(1);
    /// worker.register("count", move |_| Ok(distgrad::Message::from_payload(count.to_string())?))
    /// # }
    /// ```
    ///
    /// And what it is given ends with the call:
    ///
    /// ```compile_fail
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// let kept: std::sync::Mutex<Option<&distgrad::Request<'_>>> = Default::default();
    /// worker.register("keep", move |request| {
    ///     *kept.lock().unwrap() = Some(request);
    ///     Ok(distgrad::Message::from_payload("")?)
    /// })
    /// # }
    /// ```
    #[doc(alias = "dg_worker_register")]
    #[doc(alias = "dg_handler")]
    pub fn register<F>(&self, function: &str, handler: F) -> Result<()>
    where
        F: Fn(&Request<'_>) -> HandlerResult + Send + Sync + 'static,
    {
        Ok(ffi::worker_register(self.handle(), function, Handler::new(handler))?)
    }

    /// The same for an asynchronous closure: `async |request| { ... }`.
    ///
    /// It runs on a thread of the worker, which others use while it waits, whatever it waits for. It
    /// is dropped, and the caller gets `Code::DeadlineExceeded`, when that waits no longer.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// use distgrad::Message;
    /// worker.register_async("both", async |request| {
    ///     let message = Message::from_payload(request.payload())?;
    ///     let one = request.call_async("one", "work", &message)?;
    ///     let two = request.call_async("two", "work", &message)?;
    ///     Ok(Message::new("", [one.await?.tensor(0)?, two.await?.tensor(0)?])?)
    /// })
    /// # }
    /// ```
    pub fn register_async<F>(&self, function: &str, handler: F) -> Result<()>
    where
        F: AsyncFn(&Request<'_>) -> HandlerResult + Send + Sync + 'static,
    {
        self.register(function, move |request| future::run(handler(request), request.deadline())?)
    }

    /// Calls of this worker, outside any context, for which more can be said.
    pub fn caller(&self) -> Caller<'_> {
        Caller::new(self.handle(), ContextHandle::NULL)
    }

    /// Begins one training step across workers.
    #[doc(alias = "dg_context_create")]
    pub fn context(&self) -> Result<Context<'_>> {
        Ok(Context::own(self.handle(), ffi::context_create(self.handle())?))
    }

    /// Waits until every worker has called it as often as this one.
    #[doc(alias = "dg_worker_wait_for_all")]
    pub fn wait_for_all(&self, timeout: Duration) -> Result<()> {
        Ok(ffi::worker_wait_for_all(self.handle(), milliseconds(timeout))?)
    }

    /// Leaves in good order, so that nobody's call finds this worker gone: waits until every worker
    /// of the job has called this, and ends it.
    #[doc(alias = "dg_worker_leave")]
    #[doc(alias = "dg_worker_destroy")]
    pub fn leave(self, timeout: Duration) -> Result<()> {
        Ok(ffi::worker_leave(self.handle(), milliseconds(timeout))?)
    }

    /// Leaves in good order while the job goes on, and ends it: refuses new calls of the others with
    /// `Code::Unavailable`, and waits until those under way, and the contexts that it takes part in,
    /// are over.
    ///
    /// `Code::DeadlineExceeded` says how many were left; `Code::FailedPrecondition` for the worker
    /// that serves the rendezvous.
    #[doc(alias = "dg_worker_leave_alone")]
    pub fn leave_alone(self, timeout: Duration) -> Result<()> {
        Ok(ffi::worker_leave_alone(self.handle(), milliseconds(timeout))?)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} of {})", self.rank(), self.world_size())
    }
}
