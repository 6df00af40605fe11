//! Cancellation tokens.
use crate::{
    ffi::{self, Callback, CancellationHandle, Owned},
    Result,
};
use std::fmt;

/// A cancellation token: the caller that asked for work cancels it, and the handler that does the
/// work checks it now and then, or is called back.
///
/// A handler gets [that of its request](crate::Request::cancellation). One that is made here is for
/// calls of this program: [`Caller::cancellation`](crate::Caller::cancellation).
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Cancellation, Code, Message};
/// let cancellation = Cancellation::new()?;
/// let caller = worker.caller().cancellation(&cancellation);
/// let future = caller.call_async("back", "search", &Message::empty()?)?;
/// cancellation.cancel()?; // from any thread
/// assert_eq!(future.wait().unwrap_err().code(), Code::Cancelled);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_cancellation")]
#[doc(alias = "dg_cancellation_destroy")]
pub struct Cancellation(Owned<CancellationHandle>);

impl Cancellation {
    pub(crate) fn own(handle: CancellationHandle) -> Self {
        Self(Owned::new(handle))
    }
    pub(crate) fn handle(&self) -> CancellationHandle {
        self.0.get()
    }

    /// Creates one that is not cancelled.
    #[doc(alias = "dg_cancellation_create")]
    pub fn new() -> Result<Self> {
        Ok(Self::own(ffi::cancellation_create()?))
    }

    /// Fails the calls that were made with it with `Code::Cancelled`, and those that are made with
    /// it later. Idempotent, does not wait.
    #[doc(alias = "dg_cancellation_cancel")]
    pub fn cancel(&self) -> Result<()> {
        Ok(ffi::cancellation_cancel(self.handle())?)
    }

    /// Returns an error that says why once it is cancelled: for a handler to return.
    #[doc(alias = "dg_cancellation_check")]
    pub fn check(&self) -> Result<()> {
        Ok(ffi::cancellation_check(self.handle())?)
    }

    /// Calls `cancelled` once it is cancelled: on the thread that cancels it, where `cancelled`
    /// must not wait; or within this call, if it is cancelled already. A panic in it is printed and
    /// goes no further. The result is for [`forget`](Cancellation::forget), and need not be kept.
    #[doc(alias = "dg_cancellation_on_cancel")]
    pub fn on_cancel(&self, cancelled: impl FnOnce() + Send + 'static) -> Result<CallbackId> {
        Ok(CallbackId(ffi::cancellation_on_cancel(self.handle(), Callback::new(cancelled))?))
    }

    /// Removes a callback: when this has returned, the callback does not run and is not called any
    /// more, and it is dropped. Waits while another thread runs it, but not in the callback itself.
    /// A callback that was called is no error.
    #[doc(alias = "dg_cancellation_forget")]
    pub fn forget(&self, callback: CallbackId) -> Result<()> {
        Ok(ffi::cancellation_forget(self.handle(), callback.0)?)
    }
}

/// Names a callback of a [`Cancellation`], to remove it.
///
/// ```
/// use distgrad::{CallbackId, Cancellation};
/// let cancellation = Cancellation::new()?;
/// let callback: CallbackId = cancellation.on_cancel(|| unreachable!("it is removed below"))?;
/// // ... the work that it could stop is done ...
/// cancellation.forget(callback)?;
/// cancellation.cancel()?;
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallbackId(u64);

impl fmt::Debug for Cancellation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancellation(cancelled: {})", self.check().is_err())
    }
}
