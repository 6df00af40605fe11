//! Workers: the members of a job.
use crate::{
    error::BoxedError,
    ffi::{
        self, ContextHandle, Handle, Handler, LaterHandler, MemberCallback, Owned, WorkerHandle,
    },
    future::{self, milliseconds},
    Caller, Context, ContextState, Later, Member, MemberEvent, Message, OnLost, Request, Result,
};
use std::{fmt, num::NonZeroU64, time::Duration};

/// `DG_FOREVER`.
const FOREVER: i64 = -1;

/// What a handler returns. Any error will do; the code of an [`Error`](crate::Error) reaches the
/// caller.
pub type HandlerResult = std::result::Result<Message, BoxedError>;

/// One member of a job: it listens, calls the others, and is called by them. It owns all its threads
/// and sockets; a process may have several, for tests mostly.
///
/// Dropping it fails what is still in flight with `Code::Cancelled`, waits for its handlers, for at
/// most a minute ([`close`](Worker::close) takes another bound), and ends its threads. What still runs
/// then is said in the log, and a thread of the library ends the worker behind it; so it does where
/// the worker is dropped in a handler or a callback, which cannot wait for itself.
/// [`shutdown`](Worker::shutdown) first, so that nobody's call finds it gone.
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
    pub(crate) fn own(handle: WorkerHandle) -> Self {
        Self(Owned::new(handle))
    }
    pub(crate) fn handle(&self) -> WorkerHandle {
        self.0.get()
    }

    /// Its number in the job.
    #[doc(alias = "dg_worker_rank")]
    pub fn rank(&self) -> u32 {
        ffi::worker_rank(self.handle())
    }

    /// How many members the job has that this worker knows of, without those who have left: then
    /// their ranks have gaps.
    #[doc(alias = "dg_worker_world_size")]
    pub fn world_size(&self) -> u32 {
        ffi::worker_world_size(self.handle())
    }

    /// The name of the member with that rank; `None` if there is none.
    #[doc(alias = "dg_worker_name")]
    pub fn name(&self, rank: u32) -> Option<String> {
        Some(ffi::worker_name(self.handle(), rank)).filter(|name| !name.is_empty())
    }

    /// The members that it knows of, by rank: those of the job's start, and those who joined later
    /// and have called it.
    #[doc(alias = "dg_worker_members")]
    pub fn members(&self) -> Result<Vec<Member>> {
        Ok(ffi::worker_members(self.handle())?.into_iter().map(Member::from).collect())
    }

    /// Looks in the store for all members, as [`barrier`](Worker::barrier) does.
    #[doc(alias = "dg_worker_update_members")]
    pub fn update_members(&self) -> Result<()> {
        Ok(ffi::worker_update_members(self.handle())?)
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

    /// Records from now on when calls are made and served, and passes run, in at most so much
    /// memory (`None`: 64 MiB); what does not fit is left out, and counted.
    ///
    /// `Code::FailedPrecondition` while a trace runs.
    #[doc(alias = "dg_worker_trace_start")]
    #[doc(alias = "dg_trace_options")]
    pub fn start_trace(&self, max_bytes: Option<NonZeroU64>) -> Result<()> {
        Ok(ffi::worker_trace_start(self.handle(), max_bytes.map_or(0, NonZeroU64::get))?)
    }

    /// Ends the trace, and gives what began and ended meanwhile, in Chrome's trace event format
    /// (JSON), for `ui.perfetto.dev` and `chrome://tracing` to open. docs/trace.md explains it.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> Result<(), Box<dyn std::error::Error>> {
    /// worker.start_trace(None)?;
    /// // ... a step ...
    /// std::fs::write("trace.json", worker.stop_trace()?)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `Code::FailedPrecondition` if none runs.
    #[doc(alias = "dg_worker_trace_stop")]
    pub fn stop_trace(&self) -> Result<String> {
        Ok(Message::own(ffi::worker_trace_stop(self.handle())?).text()?.to_owned())
    }

    /// How many contexts it knows of.
    #[doc(alias = "dg_worker_context_count")]
    pub fn context_count(&self) -> usize {
        ffi::worker_context_count(self.handle())
    }

    /// What it holds of each context that it knows of: to see what a job waits for.
    #[doc(alias = "dg_worker_contexts")]
    pub fn contexts(&self) -> Result<Vec<ContextState>> {
        Ok(ffi::worker_contexts(self.handle())?.into_iter().map(ContextState::from).collect())
    }

    /// Lets all workers call `function`.
    ///
    /// The handler runs on threads of the worker, several at once; it may block and make calls
    /// ([`Request::call`]). A panic in it is an error at the caller, with `Code::Internal`. Calls
    /// that come before it is registered are refused, so register before the others may call: before
    /// a [`barrier`](Worker::barrier), for instance. It is dropped with the worker.
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
    /// ```compile_fail,E0521
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
    /// is dropped when nobody waits for the answer any more: the caller's time is over, it gave up,
    /// or it is gone.
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
        self.register(function, move |request| future::run(handler(request), request)?)
    }

    /// The same for one whose answer may come after it has returned, from any thread: of an executor
    /// of the program's own, for instance. No thread is held meanwhile.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// use distgrad::{Later, Message};
    /// let (sender, receiver) = std::sync::mpsc::channel::<Later>();
    /// worker.register_later("echo", move |later| {
    ///     let _ = sender.send(later); // one that is dropped is an error at the caller
    /// })?;
    /// std::thread::spawn(move || {
    ///     for later in receiver {
    ///         let reply = Message::from_payload(later.request().payload());
    ///         later.answer(reply.map_err(Into::into))?;
    ///     }
    ///     distgrad::Result::Ok(())
    /// });
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_worker_register_async")]
    #[doc(alias = "dg_async_handler")]
    pub fn register_later<F>(&self, function: &str, handler: F) -> Result<()>
    where
        F: Fn(Later) + Send + Sync + 'static,
    {
        Ok(ffi::worker_register_async(self.handle(), function, LaterHandler::new(handler))?)
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

    /// Waits until every worker has called it as often as this one; `None`: for as long as it takes.
    #[doc(alias = "dg_worker_barrier")]
    pub fn barrier(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.barrier_with(timeout, OnLost::Fail)
    }
    /// The same, and says what happens when a member is lost.
    pub fn barrier_with(&self, timeout: impl Into<Option<Duration>>, lost: OnLost) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_barrier(self.handle(), timeout, lost.flags())?)
    }

    /// Ends the job in good order, so that nobody's call finds this worker gone: waits until every
    /// worker has called this or [`serve`](Worker::serve), and until the calls that are in flight
    /// then are answered. Then drop it.
    ///
    /// `None` is a good timeout: if the job cannot end well, for a member is lost
    /// (`Code::Unavailable`), this ends. `Code::DeadlineExceeded` names those that have not come;
    /// `Code::FailedPrecondition` in a handler of this worker.
    #[doc(alias = "dg_worker_shutdown")]
    #[doc(alias = "dg_worker_destroy")]
    pub fn shutdown(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.shutdown_with(timeout, OnLost::Fail)
    }
    /// The same, and says what happens when a member is lost.
    pub fn shutdown_with(&self, timeout: impl Into<Option<Duration>>, lost: OnLost) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_shutdown(self.handle(), timeout, lost.flags())?)
    }

    /// For a worker that only answers the others from now on: serves until the job ends, which is
    /// when all others have left, or wait for that as well. The same as
    /// [`shutdown`](Worker::shutdown) without a timeout.
    #[doc(alias = "dg_worker_serve")]
    pub fn serve(&self) -> Result<()> {
        self.serve_with(OnLost::Fail)
    }
    /// The same, and says what happens when a member is lost.
    pub fn serve_with(&self, lost: OnLost) -> Result<()> {
        Ok(ffi::worker_serve(self.handle(), lost.flags())?)
    }

    /// Ends the worker, but for this handle of it: fails what is still in flight with
    /// `Code::Cancelled`, waits until running handlers and callbacks have returned, and stops all
    /// threads. `None`: for as long as it takes.
    ///
    /// `Code::DeadlineExceeded` says what still runs: it goes on, and the worker stays, without new
    /// work; close it again, or drop it, which then does not wait. `Code::FailedPrecondition` in a
    /// handler or callback of this worker.
    #[doc(alias = "dg_worker_close")]
    pub fn close(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_close(self.handle(), timeout)?)
    }

    /// Calls `callback` when a member has joined, has left or is lost, once for each and in order, on
    /// a thread of the worker, where it may wait and make calls. It takes the place of the one that
    /// was given before, which is not called any more when this has returned (it waits for that,
    /// unless it is called in it); nor is any when the worker was dropped.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// worker.on_member(|event| println!("{}: {:?} {}", event.member.name, event.kind, event.reason))
    /// # }
    /// ```
    #[doc(alias = "dg_worker_on_member")]
    pub fn on_member<F>(&self, callback: F) -> Result<()>
    where
        F: Fn(MemberEvent) + Send + Sync + 'static,
    {
        Ok(ffi::worker_on_member(self.handle(), MemberCallback::new(callback))?)
    }
    /// Takes the callback for members off again.
    pub fn remove_on_member(&self) -> Result<()> {
        Ok(ffi::worker_no_on_member(self.handle())?)
    }

    /// Leaves in good order while the job goes on: refuses new calls of the others with
    /// `Code::Unavailable`, and waits until those in flight, and the contexts that it takes part in,
    /// are over. Then drop it.
    ///
    /// `Code::DeadlineExceeded` says how many were left; they go on until the worker is dropped. Once:
    /// then it is `Code::FailedPrecondition`, as for the worker that serves the rendezvous.
    #[doc(alias = "dg_worker_leave")]
    pub fn leave(&self, timeout: Duration) -> Result<()> {
        Ok(ffi::worker_leave(self.handle(), milliseconds(timeout))?)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} of {})", self.rank(), self.world_size())
    }
}
