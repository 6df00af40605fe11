//! Calls: of functions and operators, of workers, inside contexts or not.
use crate::{
    ffi::{self, CancellationHandle, ContextHandle, Handle, RawCallOptions, WorkerHandle},
    future::{milliseconds_or_default, Future},
    Cancellation, Error, Message, Result, Value,
};
use std::{marker::PhantomData, time::Duration};

/// How to call: from which worker, inside which context, with how much time.
///
/// ```
/// # fn f(worker: &distgrad::Worker, context: &distgrad::Context, message: &distgrad::Message)
/// # -> distgrad::Result<()> {
/// use std::time::Duration;
/// worker.call("back", "classify", message)?; // as long as the worker's options say
/// worker.caller().timeout(Duration::from_secs(5)).call("back", "classify", message)?;
/// context.call("back", "classify", message)?; // recorded for backward
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_call_options")]
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    worker: WorkerHandle,
    context: ContextHandle,
    cancellation: CancellationHandle,
    timeout: Option<Duration>,
    lifetime: PhantomData<&'a ()>,
}

impl<'a> Caller<'a> {
    pub(crate) fn new(worker: WorkerHandle, context: ContextHandle) -> Self {
        let cancellation = CancellationHandle::NULL;
        Self { worker, context, cancellation, timeout: None, lifetime: PhantomData }
    }

    /// Calls fail with `Code::DeadlineExceeded` after that long.
    pub fn timeout(self, timeout: Duration) -> Caller<'a> {
        Self { timeout: Some(timeout), ..self }
    }

    /// Calls fail with `Code::Cancelled` as soon as it is cancelled.
    pub fn cancellation<'b>(self, cancellation: &'b Cancellation) -> Caller<'b>
    where
        'a: 'b,
    {
        Caller { cancellation: cancellation.handle(), ..self }
    }

    pub(crate) fn caller(&self) -> Caller<'a> {
        *self
    }

    fn options(&self) -> RawCallOptions {
        RawCallOptions {
            context: self.context,
            timeout_ms: milliseconds_or_default(self.timeout),
            cancellation: self.cancellation,
        }
    }

    pub(crate) fn invoke(&self, to: &str, function: &str, request: &Message) -> Result<Message> {
        let (request, options) = (request.handle(), self.options());
        Ok(Message::own(ffi::worker_call(self.worker, to, function, request, &options)?))
    }

    pub(crate) fn invoke_async(
        &self,
        to: &str,
        function: &str,
        request: &Message,
    ) -> Result<Future<Message>> {
        let (request, options) = (request.handle(), self.options());
        Ok(Future::own(ffi::worker_call_async(self.worker, to, function, request, &options)?))
    }

    pub(crate) fn invoke_each(
        &self,
        to: &[&str],
        function: &str,
        request: &Message,
    ) -> Result<Vec<Result<Message>>> {
        let (request, options) = (request.handle(), self.options());
        let replies = ffi::worker_call_each(self.worker, to, function, request, &options)?;
        Ok(replies
            .into_iter()
            .map(|reply| match reply.code {
                0 => Ok(Message::own(reply.message)),
                code => {
                    let error = Error::new(code.into(), reply.error);
                    Err(error.with_origin(reply.origin, reply.rank))
                }
            })
            .collect())
    }

    pub(crate) fn invoke_op(
        &self,
        to: &str,
        op: &str,
        arguments: &[Value<'_>],
    ) -> Result<Vec<Value<'static>>> {
        ffi::take_values(ffi::with_raw(arguments, |raw| {
            ffi::worker_call_op(self.worker, to, op, raw, &self.options())
        })?)
    }

    pub(crate) fn invoke_op_async(
        &self,
        to: &str,
        op: &str,
        arguments: &[Value<'_>],
    ) -> Result<Future<Vec<Value<'static>>>> {
        let handle = ffi::with_raw(arguments, |raw| {
            ffi::worker_call_op_async(self.worker, to, op, raw, &self.options())
        })?;
        Ok(Future::own(handle))
    }
}

/// The five calls, as methods of what has a `caller()`.
macro_rules! calls {
    ($($type:ty),*) => {$(
        impl $type {
            /// Calls a function of the worker named `to` (itself, too), and waits for the reply, and
            /// before it for room to send ([`Limits::bytes_per_peer`]($crate::Limits)).
            ///
            /// Inside a context gradients will flow back through the tensors that require grad, both
            /// ways. Large tensors are sent from where they are: do not write to them before the
            /// reply has come.
            ///
            /// The code is the handler's if that failed; `Code::NotFound` for an unknown worker or
            /// function, `Code::DeadlineExceeded` if it took too long, `Code::Unavailable` if the
            /// worker is gone, `Code::Cancelled` if it was given up, or this worker ended meanwhile,
            /// `Code::ResourceExhausted` with the name of a limit.
            #[doc(alias = "dg_worker_call")]
            pub fn call(&self, to: &str, function: &str, request: &$crate::Message) -> $crate::Result<$crate::Message> {
                self.caller().invoke(to, function, request)
            }

            /// The same without waiting: `Code::ResourceExhausted`, as the future's error, if there is
            /// no room to send.
            #[doc(alias = "dg_worker_call_async")]
            pub fn call_async(&self, to: &str, function: &str, request: &$crate::Message) -> $crate::Result<$crate::Future<$crate::Message>> {
                self.caller().invoke_async(to, function, request)
            }

            /// The same on several workers, at once and with one message, which is encoded only
            /// once. For each, in their order, what it replied, or why not. Waits for all.
            #[doc(alias = "dg_worker_call_each")]
            pub fn call_each(&self, to: &[&str], function: &str, request: &$crate::Message) -> $crate::Result<Vec<$crate::Result<$crate::Message>>> {
                self.caller().invoke_each(to, function, request)
            }

            /// Runs an operator on the worker named `to`, as [`ops`]($crate::ops) does here, and
            /// waits for its results.
            #[doc(alias = "dg_worker_call_op")]
            pub fn call_op(&self, to: &str, op: &str, arguments: &[$crate::Value<'_>]) -> $crate::Result<Vec<$crate::Value<'static>>> {
                self.caller().invoke_op(to, op, arguments)
            }

            /// The same without waiting, as `call_async`.
            #[doc(alias = "dg_worker_call_op_async")]
            pub fn call_op_async(&self, to: &str, op: &str, arguments: &[$crate::Value<'_>]) -> $crate::Result<$crate::Future<Vec<$crate::Value<'static>>>> {
                self.caller().invoke_op_async(to, op, arguments)
            }
        }
    )*};
}
calls!(Caller<'_>, crate::Worker, crate::Context<'_>, crate::Request<'_>);
