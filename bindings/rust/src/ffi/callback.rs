//! Closures that C++ holds. It calls them on any thread and ends them once; no panic may reach it.
use super::{
    bridge::raw::{self, RawRequest},
    handle::{ErrorHandle, Handle, MessageHandle},
};
use crate::{error::describe, HandlerResult, Request};
use std::{
    any::Any,
    mem::ManuallyDrop,
    panic::{catch_unwind, resume_unwind, AssertUnwindSafe},
    sync::Mutex,
    thread,
    time::Instant,
};

/// Runs `action`; what it panicked with as text.
fn catch<T>(action: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(action)).map_err(|payload| {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| text.to_string())
            .or_else(|| payload.downcast_ref::<String>().cloned());
        // Its own drop may panic too; what that panics with is not looked at any more.
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            std::mem::forget(again);
        }
        text.unwrap_or_else(|| "with a value that is no text".into())
    })
}

/// Drops what belongs to a user. The panic of a destructor has been printed by the panic hook, and
/// there is nobody else to tell.
struct Quiet<T>(ManuallyDrop<T>);

impl<T> Drop for Quiet<T> {
    fn drop(&mut self) {
        // SAFETY: it is dropped here, once, and not used again.
        let _ = catch(|| unsafe { ManuallyDrop::drop(&mut self.0) });
    }
}

type ServeFn = dyn Fn(&Request<'_>) -> HandlerResult + Send + Sync;

/// A registered function.
pub(crate) struct Handler(Quiet<Box<ServeFn>>);

impl Handler {
    pub(crate) fn new(
        serve: impl Fn(&Request<'_>) -> HandlerResult + Send + Sync + 'static,
    ) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(serve)))))
    }

    pub(crate) fn serve(&self, request: &RawRequest<'_>, reply: &mut MessageHandle) -> ErrorHandle {
        // The text of an error is the user's code too, and may panic.
        let result =
            catch(|| (self.0 .0)(&Request::new(request)).map_err(|error| describe(error.as_ref())));
        let (code, message) = match result {
            Ok(Ok(message)) => {
                *reply = message.release();
                return ErrorHandle::NULL;
            }
            Ok(Err(error)) => error,
            Err(text) => (crate::Code::Internal, format!("a handler panicked: {text}")),
        };
        raw::error_create(code as i32, &message)
    }
}

type OnceFn = dyn FnOnce() + Send;

/// What runs when a future is done.
pub(crate) struct Callback(Quiet<Mutex<Option<Box<OnceFn>>>>);

impl Callback {
    pub(crate) fn new(callback: impl FnOnce() + Send + 'static) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Mutex::new(Some(Box::new(callback)))))))
    }

    pub(crate) fn run(&self) {
        let callback = self.0 .0.lock().map_or(None, |mut callback| callback.take());
        if let Some(callback) = callback {
            let _ = catch(callback);
        }
    }
}

/// Something that waits, once.
pub(crate) struct Waiting<'a>(Option<Box<dyn FnOnce() + 'a>>);

impl Waiting<'_> {
    pub(crate) fn wait(&mut self) {
        if let Some(wait) = self.0.take() {
            wait();
        }
    }
}

/// Runs `wait` on this thread; in a handler, others may run in its place meanwhile.
pub(crate) fn wait<T>(wait: impl FnOnce() -> T) -> crate::Result<T> {
    let mut outcome = None;
    let run = || outcome = Some(catch_unwind(AssertUnwindSafe(wait)));
    raw::wait(&mut Waiting(Some(Box::new(run))))?;
    match outcome {
        Some(Ok(value)) => Ok(value),
        Some(Err(payload)) => resume_unwind(payload),
        None => Err(crate::Error::new(crate::Code::Internal, "dg_wait did not wait")),
    }
}

/// Parks this thread until it is unparked, or `deadline` has come. It may return early.
pub(crate) fn park(deadline: Option<Instant>) -> crate::Result<()> {
    wait(move || match deadline {
        Some(deadline) => thread::park_timeout(deadline.saturating_duration_since(Instant::now())),
        None => thread::park(),
    })
}

/// Keeps memory that a tensor uses.
pub(crate) struct Owner(#[allow(dead_code)] Quiet<Box<dyn Any + Send>>);

impl Owner {
    pub(crate) fn new(owner: impl Any + Send) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(owner)))))
    }
}
