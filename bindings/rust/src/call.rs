//! Calls of functions and operators on workers, inside contexts or outside.
use crate::{
    ffi::{self, CancellationHandle, ContextHandle, Handle, RawCallOptions, WorkerHandle},
    future::{milliseconds_or_default, Future},
    Cancellation, Error, Message, Result, Value,
};
use std::{marker::PhantomData, time::Duration};

/// Makes calls from a worker, inside a context or outside, with a timeout and a cancellation.
///
/// ```
/// # fn f(worker: &distgrad::Worker, context: &distgrad::Context, message: &distgrad::Message)
/// # -> distgrad::Result<()> {
/// use std::time::Duration;
/// worker.call("back", "classify", message)?; // with the timeout of the worker's options
/// worker.caller().timeout(Duration::from_secs(5)).call("back", "classify", message)?;
/// context.call("back", "classify", message)?; // recorded for backward
/// for reply in worker.call_each(&["left", "right"], "classify", message)? {
///     println!("{} tensors", reply?.tensor_count()); // or the error of this one
/// }
/// let sums = worker.call_op("back", "aten::sum", &distgrad::values![message.tensor(0)?])?;
/// # drop(sums);
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

    /// Sets the timeout, after which calls fail with `Code::DeadlineExceeded`. Default: that of the
    /// worker's options; of a [`Request`](crate::Request), what is left of its caller's.
    pub fn timeout(self, timeout: Duration) -> Caller<'a> {
        Self { timeout: Some(timeout), ..self }
    }

    /// Sets a cancellation, by which calls fail with `Code::Cancelled`. Default: none; of a
    /// [`Request`](crate::Request), its own.
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

/// The five calls, as methods of every type that has a `caller()`.
macro_rules! calls {
    ($($type:ty),*) => {$(
        impl $type {
            /// Calls a function of the worker named `to` (which may be this one). Waits for the
            /// reply, and before it for credit ([`Limits::bytes_per_peer`]($crate::Limits)).
            ///
            /// Inside a context gradients will flow back through the tensors that require grad, both
            /// ways. Large tensors are sent without a copy: do not write to them before the reply
            /// has come.
            ///
            /// The handler's error keeps its code; [`Error::origin`]($crate::Error::origin) tells it
            /// from others. Besides: `Code::NotFound` for an unknown worker or function,
            /// `Code::Unavailable` if the connection breaks or the other worker leaves,
            /// `Code::DeadlineExceeded`, `Code::Cancelled` by a cancellation or the end of this
            /// worker, `Code::ResourceExhausted` with the name of a limit.
            #[doc(alias = "dg_worker_call")]
            pub fn call(&self, to: &str, function: &str, request: &$crate::Message) -> $crate::Result<$crate::Message> {
                self.caller().invoke(to, function, request)
            }

            /// The same without waiting: `Code::ResourceExhausted`, as the future's error, if there is
            /// no credit to send.
            #[doc(alias = "dg_worker_call_async")]
            pub fn call_async(&self, to: &str, function: &str, request: &$crate::Message) -> $crate::Result<$crate::Future<$crate::Message>> {
                self.caller().invoke_async(to, function, request)
            }

            /// The same on several workers, at once and with one message, which is encoded only
            /// once. Waits for all, and returns the reply or the error of each, in their order. An
            /// error of the whole is about the arguments, and no call was made.
            #[doc(alias = "dg_worker_call_each")]
            pub fn call_each(&self, to: &[&str], function: &str, request: &$crate::Message) -> $crate::Result<Vec<$crate::Result<$crate::Message>>> {
                self.caller().invoke_each(to, function, request)
            }

            /// Runs an operator on the worker named `to`, as [`ops`]($crate::ops) does here. Waits
            /// for the results.
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
