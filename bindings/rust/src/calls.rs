//! Calls of others as they arrive, for a program's own event loop.
use crate::{Code, Error, Responder};
use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
};

/// The calls of a function, in the order in which they arrive: made by
/// [`Worker::calls`](crate::Worker::calls).
///
/// How many can wait here is bounded by what their callers may have in flight
/// ([`Limits`](crate::Limits)). When it is dropped, calls that wait, and those that come later, fail
/// with `Code::Unavailable`.
///
/// [`poll_next`](Calls::poll_next) has the signature of a stream's: with the crate `futures`,
/// `stream::poll_fn(move |context| calls.poll_next(context))` is one.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Calls, Message};
/// async fn greet(mut calls: Calls) -> distgrad::Result<()> {
///     while let Some(call) = calls.next().await {
///         let name = call.request().text().map(str::to_owned);
///         let greeting = name.and_then(|name| Message::from_payload(format!("Hello {name}")));
///         call.answer(greeting.map_err(Into::into))?;
///     }
///     Ok(()) // the worker has ended
/// }
/// let greeting = greet(worker.calls("greet")?); // for an executor: tokio::spawn(greeting)
/// # drop(greeting);
/// # Ok(())
/// # }
/// ```
pub struct Calls(Arc<Queue>);

impl Calls {
    pub(crate) fn new() -> (Self, Arrivals) {
        let queue = Arc::new(Queue::default());
        (Self(Arc::clone(&queue)), Arrivals(queue))
    }

    /// Returns the next call, once there is one; `None` when the worker has ended, by
    /// [`close`](crate::Worker::close) or since it was dropped:
    /// [`shutdown`](crate::Worker::shutdown), [`serve`](crate::Worker::serve) and
    /// [`leave`](crate::Worker::leave) do not end it. No call is lost if this is dropped before it
    /// is done.
    pub async fn next(&mut self) -> Option<Responder> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The same for a poll: the task is woken when there is something to be had.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Responder>> {
        let mut state = self.0.lock();
        if let Some(responder) = state.waiting.pop_front() {
            return Poll::Ready(Some(responder));
        }
        if state.is_worker_gone {
            return Poll::Ready(None);
        }
        let former = state.waker.replace(context.waker().clone());
        drop(state);
        drop(former); // an executor's code, outside of the lock
        Poll::Pending
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let (waiting, waker) = {
            let mut state = self.0.lock();
            state.is_taken = false;
            (std::mem::take(&mut state.waiting), state.waker.take())
        };
        drop(waker);
        waiting.into_iter().for_each(refuse);
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls({} waiting)", self.0.lock().waiting.len())
    }
}

/// Where the worker puts them.
pub(crate) struct Arrivals(Arc<Queue>);

impl Arrivals {
    pub(crate) fn push(&self, responder: Responder) {
        let mut state = self.0.lock();
        if !state.is_taken {
            drop(state);
            return refuse(responder);
        }
        state.waiting.push_back(responder);
        let waker = state.waker.take();
        drop(state);
        wake(waker);
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.lock();
            state.is_worker_gone = true;
            state.waker.take()
        };
        wake(waker);
    }
}

struct State {
    waiting: VecDeque<Responder>,
    waker: Option<Waker>,
    is_taken: bool,
    is_worker_gone: bool,
}

struct Queue(Mutex<State>);

impl Default for Queue {
    fn default() -> Self {
        let waiting = VecDeque::new();
        Self(Mutex::new(State { waiting, waker: None, is_taken: true, is_worker_gone: false }))
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

fn refuse(responder: Responder) {
    let name = responder.request().function().to_owned();
    let error =
        Error::new(Code::Unavailable, format!("nobody takes the calls of '{name}' any more"));
    // It fails only for a responder that has answered.
    let _ = responder.answer(Err(error.into()));
}
