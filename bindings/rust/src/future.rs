//! Work in flight on other workers.
use crate::{
    ffi::{self, Callback, FutureHandle, Owned},
    waker_slot::WakerSlot,
    Code, Error, Message, Request, Result, Value,
};
use std::{
    fmt,
    future::IntoFuture,
    marker::PhantomData,
    pin::{pin, Pin},
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc,
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

mod sealed {
    use super::*;

    /// A future that is done. Only this crate can look into it.
    pub struct Done<'a>(pub(crate) &'a Owned<FutureHandle>);

    /// The results that a future can have.
    pub trait Outcome: Sized {
        fn of(future: Done<'_>) -> Result<Self>;
    }
    impl Outcome for () {
        fn of(future: Done<'_>) -> Result<Self> {
            ffi::future_result(future.0.get())?; // null: such work has no reply
            Ok(())
        }
    }
    impl Outcome for Message {
        fn of(future: Done<'_>) -> Result<Self> {
            Ok(Message::own(ffi::future_result(future.0.get())?))
        }
    }
    impl Outcome for Vec<Value<'static>> {
        fn of(future: Done<'_>) -> Result<Self> {
            ffi::take_values(ffi::future_values(future.0.get())?)
        }
    }
}
use sealed::{Done, Outcome};

/// The outcome of work in flight: a `T`, or an error.
///
/// It can be awaited, waited for, or polled. Work ends at its deadline at the latest, so no wait is
/// for ever, unless the work was given none: by a timeout of `Duration::MAX`, or `None` for
/// [`save_async`](crate::CheckpointManager::save_async).
///
/// Any executor will do, for a future wakes its task by the waker that it is polled with, and needs
/// neither a thread nor a timer of the executor's. The tests await futures on tokio and on smol, and
/// not on async-std, which its authors have given up for smol.
///
/// Dropping it neither cancels the work nor waits for it. But once it is being awaited, it is as
/// other futures are: when the task that awaits it is dropped, by a timeout for instance, the work is
/// [cancelled](Future::cancel). To give up waiting alone, wait with
/// [`wait_timeout`](Future::wait_timeout), or await something that [`then`](Future::then) completes.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::Message;
/// use std::time::Duration;
/// let future = worker.call_async("back", "classify", &Message::empty()?)?;
/// // ... something else, while the other worker works ...
/// match future.wait_timeout(Duration::from_secs(1)) {
///     Some(reply) => println!("{} tensors", reply?.tensor_count()),
///     None => future.cancel()?,
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_future")]
pub struct Future<T> {
    handle: Owned<FutureHandle>,
    outcome: PhantomData<fn() -> T>,
}

impl<T: Outcome> Future<T> {
    pub(crate) fn own(handle: FutureHandle) -> Self {
        Self { handle: Owned::new(handle), outcome: PhantomData }
    }

    /// Waits until it is done.
    #[doc(alias = "dg_future_wait")]
    #[doc(alias = "dg_future_result")]
    #[doc(alias = "dg_future_values")]
    pub fn wait(&self) -> Result<T> {
        ffi::future_wait(self.handle.get(), FOREVER)?;
        T::of(Done(&self.handle))
    }

    /// Waits until it is done, at most that long; `None` if it is not done by then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<T>> {
        match ffi::future_wait(self.handle.get(), milliseconds(timeout)) {
            Ok(true) => Some(T::of(Done(&self.handle))),
            Ok(false) => None,
            Err(error) => Some(Err(error.into())),
        }
    }

    /// Returns whether it is done.
    pub fn is_done(&self) -> bool {
        matches!(ffi::future_wait(self.handle.get(), 0), Ok(true))
    }

    /// Calls `done` once it is done: on the thread that completes it, where `done` must not wait;
    /// or within this call, if it is done already. A panic in it is printed and goes no further.
    ///
    /// ```
    /// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
    /// let (done, finished) = std::sync::mpsc::channel();
    /// for worker_name in ["worker1", "worker2"] {
    ///     let reply = worker.call_async(worker_name, "work", &distgrad::Message::empty()?)?;
    ///     let done = done.clone();
    ///     reply.then(move || drop(done.send(worker_name)))?;
    /// }
    /// println!("{} was first", finished.recv().unwrap());
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "dg_future_then")]
    pub fn then(&self, done: impl FnOnce() + Send + 'static) -> Result<()> {
        Ok(ffi::future_then(self.handle.get(), Callback::new(done))?)
    }

    /// Cancels a call or a backward: it is then done, with `Code::Cancelled` unless it was done
    /// before. A handler that runs already is not stopped, but [can see the
    /// cancellation](crate::Request::cancellation), and its answer is dropped. A cancelled backward
    /// ends on every worker, and its context is good for [`release`](crate::Context::release) only.
    /// No effect on one that is done. Does not wait.
    #[doc(alias = "dg_future_cancel")]
    pub fn cancel(&self) -> Result<()> {
        Ok(ffi::future_cancel(self.handle.get())?)
    }
}

impl<T> fmt::Debug for Future<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Future")
    }
}

impl<T: Outcome> IntoFuture for Future<T> {
    type Output = Result<T>;
    type IntoFuture = Awaiting<T>;

    fn into_future(self) -> Awaiting<T> {
        Awaiting { future: self, waker: WakerSlot::new(), is_done: false }
    }
}

/// A [`Future`] that is being awaited. Dropping it before it is done cancels the work.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Awaiting, Message};
/// use std::future::IntoFuture; // which .await calls
/// let call = worker.call_async("back", "work", &Message::empty()?)?;
/// let reply: Awaiting<Message> = call.into_future(); // for what takes futures: tokio::time::timeout
/// drop(reply); // cancels the call
/// # Ok(())
/// # }
/// ```
pub struct Awaiting<T> {
    future: Future<T>,
    waker: WakerSlot,
    is_done: bool,
}

impl<T: Outcome> std::future::Future for Awaiting<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let future = &self.future;
        let outcome = self
            .waker
            .poll(context.waker(), || future.is_done(), |end| future.then(|| end.wake()))
            .map(|done| done.and_then(|()| T::of(Done(&future.handle))));
        self.is_done = outcome.is_ready();
        outcome
    }
}

impl<T> Drop for Awaiting<T> {
    fn drop(&mut self) {
        if !self.is_done {
            // It fails only for what is no future.
            let _ = ffi::future_cancel(self.future.handle.get());
        }
    }
}

impl<T> Unpin for Awaiting<T> {}

/// Runs a future on this thread, a handler's. What it waits for may be other handlers.
pub(crate) fn run<T>(
    future: impl std::future::Future<Output = T>,
    request: &Request<'_>,
) -> Result<T> {
    struct Unpark {
        thread: Thread,
        woken: AtomicBool,
    }
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, Ordering::Release);
            self.thread.unpark();
        }
    }
    let unpark = Arc::new(Unpark { thread: thread::current(), woken: AtomicBool::new(true) });
    let waker = Waker::from(Arc::clone(&unpark));
    let (cancellation, deadline) = (request.cancellation(), request.deadline());
    let cancelled = waker.clone();
    cancellation.on_cancel(move || cancelled.wake())?;
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if unpark.woken.swap(false, Ordering::Acquire) {
            cancellation.check()?;
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return Ok(result);
            }
        } else if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Error::new(Code::DeadlineExceeded, "the caller waits no longer"));
        } else {
            ffi::park(deadline)?;
        }
    }
}

pub(crate) const FOREVER: i64 = -1;

/// Converts to C's milliseconds, rounded up, for 0 has a meaning of its own; what does not fit is
/// for ever.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(FOREVER)
}

/// The same for an option whose 0 stands for the default: 1 at least.
pub(crate) fn not_zero_milliseconds(duration: Duration) -> i64 {
    match milliseconds(duration) {
        0 => 1,
        milliseconds => milliseconds,
    }
}

/// The same for an option that may be left out.
pub(crate) fn milliseconds_or_default(duration: Option<Duration>) -> i64 {
    duration.map_or(0, not_zero_milliseconds)
}
