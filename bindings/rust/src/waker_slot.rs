//! Whom to wake at the end of what is awaited. The tests in bindings/rust/loom run this very file in
//! all orders in which its threads can take their steps.
use crate::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

/// Shared by whoever polls and by what is called at the end. Empty before the first poll, and from
/// the end on.
pub(crate) struct WakerSlot(Arc<Mutex<Option<Waker>>>);

impl WakerSlot {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    /// Ready if `is_done`; else `waker` will be woken at the end, in the place of that of an earlier
    /// poll. The first poll has `then` arrange that: [`AtEnd::wake`] is to be called once it is
    /// done, on any thread, or within `then`.
    pub(crate) fn poll<E>(
        &self,
        waker: &Waker,
        is_done: impl FnOnce() -> bool,
        then: impl FnOnce(AtEnd) -> Result<(), E>,
    ) -> Poll<Result<(), E>> {
        let first = replace(&self.0, Some(waker.clone())).is_none();
        // Looked at behind the waker: whoever ends it now either is seen here, or wakes.
        if is_done() {
            return Poll::Ready(Ok(()));
        }
        if first {
            if let Err(error) = then(AtEnd(Arc::clone(&self.0))) {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Pending
    }
}

/// What wakes, once.
pub(crate) struct AtEnd(Arc<Mutex<Option<Waker>>>);

impl AtEnd {
    pub(crate) fn wake(self) {
        if let Some(waker) = replace(&self.0, None) {
            waker.wake();
        }
    }
}

/// Gives what was there before: it is woken, or dropped, outside of the lock, for it is an
/// executor's.
fn replace(slot: &Mutex<Option<Waker>>, waker: Option<Waker>) -> Option<Waker> {
    let mut held = slot.lock().unwrap_or_else(|poison| poison.into_inner());
    std::mem::replace(&mut *held, waker)
}
