//! Wakes the task that awaits a future. The tests in bindings/rust/loom run this file in all orders
//! in which its threads can take their steps.
use crate::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

/// The waker of the last poll, shared by the polling task and the callback of the future. Empty
/// before the first poll, and once the future is done.
pub(crate) struct WakerSlot(Arc<Mutex<Option<Waker>>>);

impl WakerSlot {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    /// Returns ready if `is_done`; else stores `waker`, in place of an earlier poll's, to be woken
    /// when the future is done. The first poll calls `then` to arrange for that: [`AtEnd::wake`] is
    /// to be called once it is done, on any thread, or within `then`.
    pub(crate) fn poll<E>(
        &self,
        waker: &Waker,
        is_done: impl FnOnce() -> bool,
        then: impl FnOnce(AtEnd) -> Result<(), E>,
    ) -> Poll<Result<(), E>> {
        let first = replace(&self.0, Some(waker.clone())).is_none();
        // Checked after the waker is stored: a completion from now on either is seen here, or wakes.
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

/// Wakes, once.
pub(crate) struct AtEnd(Arc<Mutex<Option<Waker>>>);

impl AtEnd {
    pub(crate) fn wake(self) {
        if let Some(waker) = replace(&self.0, None) {
            waker.wake();
        }
    }
}

/// Returns the former waker: it is woken, or dropped, outside of the lock, for it is an executor's.
fn replace(slot: &Mutex<Option<Waker>>, waker: Option<Waker>) -> Option<Waker> {
    let mut held = slot.lock().unwrap_or_else(|poison| poison.into_inner());
    std::mem::replace(&mut *held, waker)
}
