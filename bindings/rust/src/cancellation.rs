//! Whether work is still wanted.
use crate::{
    ffi::{self, Callback, CancellationHandle, Owned},
    Result,
};
use std::fmt;

/// Whether work is still wanted: the caller that asked for it says when it is not, and the handler
/// that does it checks now and then, or is told.
///
/// A handler has that of [its request](crate::Request::cancellation); one made here goes with calls
/// by [`Caller::cancellation`](crate::Caller::cancellation), and fails them all together.
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

    /// One that is not cancelled.
    #[doc(alias = "dg_cancellation_create")]
    pub fn new() -> Result<Self> {
        Ok(Self::own(ffi::cancellation_create()?))
    }

    /// Fails the calls that go with it with `Code::Cancelled`, for good; those, too, that are made
    /// later. Idempotent, does not wait.
    #[doc(alias = "dg_cancellation_cancel")]
    pub fn cancel(&self) -> Result<()> {
        Ok(ffi::cancellation_cancel(self.handle())?)
    }

    /// An error that says why, once it is cancelled: for a handler to return.
    #[doc(alias = "dg_cancellation_check")]
    pub fn check(&self) -> Result<()> {
        Ok(ffi::cancellation_check(self.handle())?)
    }

    /// Calls `cancelled` once it is cancelled: on the thread that does so, which `cancelled` must not
    /// hold up; or within this call, if it is already. A panic in it is printed and goes no further.
    /// What is returned is for [`forget`](Cancellation::forget), and need not be kept.
    #[doc(alias = "dg_cancellation_then")]
    pub fn then(&self, cancelled: impl FnOnce() + Send + 'static) -> Result<CallbackId> {
        Ok(CallbackId(ffi::cancellation_then(self.handle(), Callback::new(cancelled))?))
    }

    /// Takes a callback off again: when this has returned it is not running, nor will it, and it is
    /// dropped. Waits while another thread is in it; in the callback itself it does not. One that
    /// was called is no error.
    #[doc(alias = "dg_cancellation_forget")]
    pub fn forget(&self, callback: CallbackId) -> Result<()> {
        Ok(ffi::cancellation_forget(self.handle(), callback.0)?)
    }
}

/// A callback of a [`Cancellation`], by which it is taken off again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallbackId(u64);

impl fmt::Debug for Cancellation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancellation(cancelled: {})", self.check().is_err())
    }
}
