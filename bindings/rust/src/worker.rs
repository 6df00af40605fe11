//! Workers: the members of a job.
use crate::{
    error::BoxedError,
    ffi::{
        self, ContextHandle, Handle, Handler, MemberCallback, Owned, ResponderHandler, WorkerHandle,
    },
    future::{self, milliseconds},
    Caller, Calls, Context, ContextState, Member, MemberEvent, Message, OnLost, Request, Responder,
    Result,
};
use std::{fmt, num::NonZeroU64, sync::Arc, time::Duration};

/// `DG_FOREVER`.
const FOREVER: i64 = -1;

/// What a handler returns. Any error will do; of an [`Error`](crate::Error) the caller gets the
/// code, also if it is among the [sources](std::error::Error::source) of what is returned. One that
/// another error hides behind itself (`transparent` of thiserror, anyhow without a context) is not
/// found.
///
/// ```
/// use distgrad::{HandlerResult, Message, Request};
/// fn scale(request: &Request<'_>) -> HandlerResult {
///     let factor: f64 = request.text()?.parse()?; // an error of the crate, and one of another
///     Ok(Message::new("", [request.tensor(0)?.mul_scalar(factor)?])?)
/// }
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// worker.register("scale", scale)
/// # }
/// ```
pub type HandlerResult = std::result::Result<Message, BoxedError>;

/// One member of a job: it listens, calls the others, and is called by them. It owns all its threads
/// and sockets; a process may have several, mostly for tests.
///
/// ```
/// use distgrad::{Message, WorkerOptions};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let worker = WorkerOptions::new().create()?; // alone, unless a launcher has started a job
/// worker.register("greet", |request| {
///     Ok(Message::from_payload(format!("Hello {}", request.text()?))?)
/// })?;
/// let name = worker.name(worker.rank()).ok_or("it has a name")?; // it may call itself
/// let reply = worker.call(&name, "greet", &Message::from_payload("reader")?)?;
/// assert_eq!(reply.text()?, "Hello reader");
/// worker.shutdown(None)?;
/// # Ok(())
/// # }
/// ```
///
/// Call [`shutdown`](Worker::shutdown) before it is dropped, so that no call finds it gone. Dropping
/// it calls [`close`](Worker::close) with a timeout of one minute. What still runs after that minute
/// is logged, and a thread of the library ends the worker when it has returned; in a handler or a
/// callback, which cannot wait for itself, that thread does all of it.
///
/// Contexts and optimizers borrow the worker, or keep it in an [`Arc`]
/// ([`shared_context`](Worker::shared_context)). A [`Future`](crate::Future) may outlive it, and ends
/// with an error.
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

    /// Returns its rank in the job.
    #[doc(alias = "dg_worker_rank")]
    pub fn rank(&self) -> u32 {
        ffi::worker_rank(self.handle())
    }

    /// Returns how many members it knows of, without those that have left, so that ranks may have
    /// gaps.
    #[doc(alias = "dg_worker_world_size")]
    pub fn world_size(&self) -> u32 {
        ffi::worker_world_size(self.handle())
    }

    /// Returns the name of the member with that rank; `None` if there is no such member.
    #[doc(alias = "dg_worker_name")]
    pub fn name(&self, rank: u32) -> Option<String> {
        Some(ffi::worker_name(self.handle(), rank)).filter(|name| !name.is_empty())
    }

    /// Returns the members that it knows of, by rank: those of the job's start, and of those who
    /// joined later the ones that have called it.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// for member in worker.members()? {
    ///     println!("worker {}: {}, incarnation {}", member.rank, member.name, member.incarnation);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_worker_members")]
    pub fn members(&self) -> Result<Vec<Member>> {
        Ok(ffi::worker_members(self.handle())?.into_iter().map(Member::from).collect())
    }

    /// Reads all members from the store, as [`barrier`](Worker::barrier) does. Waits.
    #[doc(alias = "dg_worker_update_members")]
    pub fn update_members(&self) -> Result<()> {
        Ok(ffi::worker_update_members(self.handle())?)
    }

    /// Returns its number among the workers of its machine, as the launcher says: to choose a
    /// device by. 0 if it says nothing.
    #[doc(alias = "dg_worker_local_rank")]
    pub fn local_rank(&self) -> u32 {
        ffi::worker_local_rank(self.handle())
    }

    /// Returns how many workers its machine has, as the launcher says. 0 if it says nothing.
    #[doc(alias = "dg_worker_local_world_size")]
    pub fn local_world_size(&self) -> u32 {
        ffi::worker_local_world_size(self.handle())
    }

    /// Returns metrics of what it has done so far, in Prometheus' text format (version 0.0.4).
    /// docs/metrics.md explains each number.
    #[doc(alias = "dg_worker_metrics_text")]
    pub fn metrics_text(&self) -> Result<String> {
        Ok(Message::own(ffi::worker_metrics_text(self.handle())?).text()?.to_owned())
    }

    /// Starts to record when calls are made and served, when passes run, and what the ranks of
    /// pipelines do, in at most so many bytes of memory (`None`: 64 MiB), and as many again for
    /// pipelines; events that do not fit are counted only.
    ///
    /// `Code::FailedPrecondition` while a trace runs.
    #[doc(alias = "dg_worker_start_trace")]
    #[doc(alias = "dg_trace_options")]
    pub fn start_trace(&self, max_bytes: Option<NonZeroU64>) -> Result<()> {
        Ok(ffi::worker_trace_start(self.handle(), max_bytes.map_or(0, NonZeroU64::get))?)
    }

    /// Ends the trace, and returns what began and ended meanwhile, in Chrome's trace event format
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
    /// `Code::FailedPrecondition` if no trace runs.
    #[doc(alias = "dg_worker_stop_trace")]
    pub fn stop_trace(&self) -> Result<String> {
        Ok(Message::own(ffi::worker_trace_stop(self.handle())?).text()?.to_owned())
    }

    /// Returns how many contexts it knows of.
    #[doc(alias = "dg_worker_context_count")]
    pub fn context_count(&self) -> usize {
        ffi::worker_context_count(self.handle())
    }

    /// Returns what it holds of each context that it knows of, to show what a job waits for. Waits
    /// for running steps of passes, not for passes.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// for context in worker.contexts()? {
    ///     for pass in context.passes {
    ///         println!("context {:#x} waits for gradients of {:?}", context.id, pass.awaited);
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_worker_contexts")]
    pub fn contexts(&self) -> Result<Vec<ContextState>> {
        Ok(ffi::worker_contexts(self.handle())?.into_iter().map(ContextState::from).collect())
    }

    /// Lets all workers call `function`.
    ///
    /// The handler runs on threads of the worker, several at once; it may wait and make calls
    /// ([`Request::call`]). A panic in it is an error of the caller, with `Code::Internal`. Earlier
    /// calls are refused, so register before the others may call: before a
    /// [`barrier`](Worker::barrier), for instance. The handler is dropped with the worker.
    ///
    /// `Code::AlreadyExists` if `function` is registered; `Code::InvalidArgument` if the name is
    /// empty, longer than 1000 bytes, contains `::` (as operators' names do) or begins with
    /// `distgrad.`.
    ///
    /// What a handler uses has to live as long as the worker, and to be usable on several threads:
    ///
    /// ```compile_fail,E0277
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// let count = std::rc::Rc::new(1);
    /// worker.register("count", move |_| Ok(distgrad::Message::from_payload(count.to_string())?))
    /// # }
    /// ```
    ///
    /// The request ends with the call:
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
    /// It runs on a thread of the worker, which other handlers use while it waits, whatever it waits
    /// for. It is dropped as soon as nobody waits for the answer: the caller's deadline has passed,
    /// it gave up, or it is gone.
    ///
    /// On that thread there is no runtime: what needs one, as timers and sockets of tokio do, finds
    /// it after `let _entered = handle.enter();`, with a `tokio::runtime::Handle`, or is awaited by
    /// a task of that runtime, which takes [`calls`](Worker::calls).
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

    /// The same for a handler whose answer may come after it has returned, from any thread: of the
    /// program's own executor, for instance. No thread is held meanwhile.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// use distgrad::{Message, Responder};
    /// let (sender, receiver) = std::sync::mpsc::channel::<Responder>();
    /// worker.register_responder("echo", move |responder| {
    ///     let _ = sender.send(responder); // if it is dropped, the caller gets an error
    /// })?;
    /// std::thread::spawn(move || {
    ///     for responder in receiver {
    ///         let reply = Message::from_payload(responder.request().payload());
    ///         responder.answer(reply.map_err(Into::into))?;
    ///     }
    ///     distgrad::Result::Ok(())
    /// });
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_worker_register_responder")]
    #[doc(alias = "dg_responder_handler")]
    pub fn register_responder<F>(&self, function: &str, handler: F) -> Result<()>
    where
        F: Fn(Responder) + Send + Sync + 'static,
    {
        Ok(ffi::worker_register_responder(self.handle(), function, ResponderHandler::new(handler))?)
    }

    /// Lets all workers call `function`, and returns their calls one after the other, for a task of
    /// the program's own executor to answer. No thread is held meanwhile.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// use distgrad::Message;
    /// let mut calls = worker.calls("echo")?;
    /// let serve = async move {
    ///     while let Some(call) = calls.next().await {
    ///         let reply = Message::from_payload(call.request().payload())?;
    ///         call.answer(Ok(reply))?;
    ///     }
    ///     distgrad::Result::Ok(())
    /// };
    /// # drop(serve);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The task ends with the worker. So [`close`](Worker::close) or drop that before you wait for
    /// the task, also after [`shutdown`](Worker::shutdown); and let the task keep no [`Arc`] of the
    /// worker: the calls of its own go by [`request`](Responder::request).
    ///
    /// Errors as of [`register`](Worker::register).
    pub fn calls(&self, function: &str) -> Result<Calls> {
        let (calls, arrivals) = Calls::new();
        self.register_responder(function, move |responder| arrivals.push(responder))?;
        Ok(calls)
    }

    /// Returns a [`Caller`] of this worker, outside any context, to set a timeout or a
    /// cancellation.
    pub fn caller(&self) -> Caller<'_> {
        Caller::new(self.handle(), ContextHandle::NULL)
    }

    /// Creates a context: one training step across workers.
    #[doc(alias = "dg_context_create")]
    pub fn context(&self) -> Result<Context<'_>> {
        Ok(Context::own(self.handle(), ffi::context_create(self.handle())?))
    }

    /// Moves the gradients of all contexts into the first of them, on every worker of the job, for
    /// gradient accumulation. Each leaf then has there what the first context had for it, to which
    /// those of the others were added in their order: to the last bit what one process gives that
    /// adds up the backwards of each context first; the others have no gradients any more. A step, clipping and an average take the
    /// sums from the first context. Call it when the backwards are over. Waits for all workers.
    ///
    /// `Code::InvalidArgument`, and nothing has changed, without a context, or with one that is there
    /// twice; `Code::FailedPrecondition` for one that is released, or
    /// whose average in its backward was not taken. After an error of a worker the
    /// contexts are good for [`release`](Context::release) only.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker, optimizer: &distgrad::Optimizer) -> distgrad::Result<()> {
    /// let contexts = [worker.context()?, worker.context()?];
    /// // ... a backward in each ...
    /// worker.sum_gradients(&contexts)?;
    /// optimizer.step(&contexts[0])
    /// # }
    /// ```
    #[doc(alias = "dg_worker_sum_gradients")]
    pub fn sum_gradients<'c>(
        &self,
        contexts: impl IntoIterator<Item = &'c Context<'c>>,
    ) -> Result<()> {
        let handles: Vec<_> = contexts.into_iter().map(Context::handle).collect();
        Ok(ffi::worker_sum_gradients(self.handle(), &handles)?)
    }

    /// Creates a context that keeps the worker, and so can stand in a struct beside it, or go to
    /// another thread or task. The worker ends with the last of them, which must not be in one of
    /// its own handlers or callbacks, nor in a function of its stages or of its parts of
    /// checkpoints: its worker keeps that, and both would be there for ever. Hold a
    /// [`Weak`](std::sync::Weak) there.
    ///
    /// ```
    /// # fn f(worker: distgrad::Worker, layer: distgrad::Tensor) -> distgrad::Result<()> {
    /// use distgrad::{Context, Optimizer, Sgd, Worker};
    /// use std::sync::Arc;
    /// struct Trainer {
    ///     step: Context<'static>,
    ///     optimizer: Optimizer<'static>,
    ///     worker: Arc<Worker>,
    /// }
    /// let worker = Arc::new(worker);
    /// let mut trainer = Trainer {
    ///     step: worker.shared_context()?,
    ///     optimizer: Sgd::new(0.1).create_shared(&worker, "", [&layer])?,
    ///     worker,
    /// };
    /// trainer.optimizer.step(&trainer.step)?;
    /// trainer.step = trainer.worker.shared_context()?;
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_context_create")]
    pub fn shared_context(self: &Arc<Self>) -> Result<Context<'static>> {
        Ok(Context::own_with(self, ffi::context_create(self.handle())?))
    }

    /// Waits until every worker has called this as often as this one; without a timeout if that is
    /// `None`. `Code::DeadlineExceeded` names those that have not; `Code::Unavailable` names a
    /// member that is lost.
    #[doc(alias = "dg_worker_barrier")]
    pub fn barrier(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.barrier_with(timeout, OnLost::Fail)
    }
    /// The same, with a choice of what to do when a member is lost.
    pub fn barrier_with(&self, timeout: impl Into<Option<Duration>>, lost: OnLost) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_barrier(self.handle(), timeout, lost.flags())?)
    }

    /// Ends the job in good order, so that no call finds this worker gone. Waits until every worker
    /// has called this or [`serve`](Worker::serve), and until the calls in flight are answered;
    /// then drop the worker, which is there until then, with its handlers.
    ///
    /// `None` is a good timeout: if the job cannot end well, since a member is lost
    /// (`Code::Unavailable`), this returns an error. `Code::DeadlineExceeded` names those that have
    /// not come; `Code::FailedPrecondition` in a handler of this worker.
    #[doc(alias = "dg_worker_shutdown")]
    #[doc(alias = "dg_worker_destroy")]
    pub fn shutdown(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.shutdown_with(timeout, OnLost::Fail)
    }
    /// The same, with a choice of what to do when a member is lost.
    pub fn shutdown_with(&self, timeout: impl Into<Option<Duration>>, lost: OnLost) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_shutdown(self.handle(), timeout, lost.flags())?)
    }

    /// Serves until the job ends: until all others have left, or have called this or
    /// [`shutdown`](Worker::shutdown). For a worker that only answers the others from now on. The
    /// same as `shutdown` without a timeout.
    #[doc(alias = "dg_worker_serve")]
    pub fn serve(&self) -> Result<()> {
        self.serve_with(OnLost::Fail)
    }
    /// The same, with a choice of what to do when a member is lost.
    pub fn serve_with(&self, lost: OnLost) -> Result<()> {
        Ok(ffi::worker_serve(self.handle(), lost.flags())?)
    }

    /// Ends the worker, but keeps this handle. Fails what is in flight with `Code::Cancelled`,
    /// waits until running handlers and callbacks have returned, and stops all threads. `None`:
    /// without a timeout. Idempotent.
    ///
    /// `Code::DeadlineExceeded` says what still runs: that goes on, and the worker stays, without
    /// new work; close it again, or drop it, which then does not wait. `Code::FailedPrecondition`
    /// in a handler or callback of this worker.
    #[doc(alias = "dg_worker_close")]
    pub fn close(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_close(self.handle(), timeout)?)
    }

    /// Calls `callback` when a member has joined, has left or is lost, once for each event and in
    /// order, on a thread of the worker, where it may wait and make calls. It replaces the former
    /// callback. When this has returned, the former callback is not called any more (this waits for
    /// it, unless it is called there); and none is when the worker has been dropped.
    ///
    /// For its calls let it hold a [`Weak`](std::sync::Weak): the worker keeps the callback, and an
    /// [`Arc`] in it the worker, for ever.
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
    /// Removes the callback for members.
    pub fn remove_on_member(&self) -> Result<()> {
        Ok(ffi::worker_no_on_member(self.handle())?)
    }

    /// Leaves in good order while the job goes on: refuses new calls of the others with
    /// `Code::Unavailable`, and waits until calls in flight and the contexts that this worker takes
    /// part in are over; then drop the worker. `None`: without a timeout. Call it once.
    ///
    /// `Code::DeadlineExceeded` counts those that are left; they go on until the worker is dropped.
    /// `Code::FailedPrecondition` the second time, in a handler of this worker, and for the worker
    /// that serves the rendezvous.
    #[doc(alias = "dg_worker_leave")]
    pub fn leave(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let timeout = timeout.into().map_or(FOREVER, milliseconds);
        Ok(ffi::worker_leave(self.handle(), timeout)?)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({} of {})", self.rank(), self.world_size())
    }
}
