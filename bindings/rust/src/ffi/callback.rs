//! Closures that C++ holds. It calls them on any thread and drops them once; no panic may reach it.
use super::{
    bridge::raw::{self, RawLoadedValues, RawMemberEvent, RawReplica, RawRequest},
    handle::{
        CheckpointValuesHandle, ErrorHandle, Handle, MessageHandle, ResponderHandle, TensorHandle,
    },
};
use crate::{
    error::{describe, BoxedError},
    CheckpointValues, Code, Error, HandlerResult, LoadedValues, MemberEvent, Replica, Request,
    Responder, Severity, Tensor,
};
use std::{
    any::Any,
    mem::ManuallyDrop,
    panic::{catch_unwind, resume_unwind, AssertUnwindSafe},
    slice,
    sync::Mutex,
    thread,
    time::Instant,
};

/// Runs `action`, and turns its panic into a text.
fn catch<T>(action: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(action)).map_err(|payload| {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| text.to_string())
            .or_else(|| payload.downcast_ref::<String>().cloned());
        // Its own drop may panic too; that payload is leaked.
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            std::mem::forget(again);
        }
        text.unwrap_or_else(|| "with a value that is no text".into())
    })
}

/// Runs a user's closure, and turns its error or panic into an error that the library takes.
pub(super) fn run<T>(
    what: &str,
    action: impl FnOnce() -> Result<T, BoxedError>,
) -> Result<T, ErrorHandle> {
    // The text of an error is the user's code too, and may panic.
    let error = match catch(|| action().map_err(|error| describe(error.as_ref()))) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error,
        Err(text) => Error::new(Code::Internal, format!("{what} panicked: {text}")),
    };
    Err(error_create(&error))
}

/// Creates an error that the library takes.
pub(crate) fn error_create(error: &Error) -> ErrorHandle {
    let (origin, rank) = error.raw_origin();
    raw::error_create(error.code() as i32, error.message(), origin, rank)
}

/// Drops a user's closure. The panic hook has printed a panic of a destructor, and there is nobody
/// else to tell.
pub(super) struct Quiet<T>(pub(super) ManuallyDrop<T>);

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
        let message = run("a handler", || (self.0 .0)(&Request::new(request)));
        message.map_or_else(
            |error| error,
            |message| {
                *reply = message.release();
                ErrorHandle::NULL
            },
        )
    }
}

type RespondFn = dyn Fn(Responder) + Send + Sync;

/// A registered function that answers later.
pub(crate) struct ResponderHandler(Quiet<Box<RespondFn>>);

impl ResponderHandler {
    pub(crate) fn new(serve: impl Fn(Responder) + Send + Sync + 'static) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(serve)))))
    }

    pub(crate) fn serve(&self, request: &RawRequest<'_>, responder: ResponderHandle) {
        // SAFETY: "The request and all in it live until then": until the responder is answered or
        // destroyed. Responder has both, and lends the request for no longer than it lives.
        let function =
            unsafe { slice::from_raw_parts(request.function.as_ptr(), request.function.len()) };
        let request = Request::new(&RawRequest {
            worker: request.worker,
            function,
            from: request.from,
            message: request.message,
            context: request.context,
            timeout_ms: request.timeout_ms,
            cancellation: request.cancellation,
        });
        let _ = catch(|| (self.0 .0)(Responder::own(request, responder)));
    }
}

type ForwardFn = dyn Fn(&Replica) -> Result<Vec<Option<Tensor>>, BoxedError> + Send + Sync;

/// The function of a data parallel.
pub(crate) struct Forward(Quiet<Box<ForwardFn>>);

impl Forward {
    pub(crate) fn new(
        forward: impl Fn(&Replica) -> Result<Vec<Option<Tensor>>, BoxedError> + Send + Sync + 'static,
    ) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(forward)))))
    }

    pub(crate) fn forward(
        &self,
        replica: &RawReplica<'_>,
        outputs: &mut [TensorHandle],
    ) -> ErrorHandle {
        let made = run("the function", || {
            let made = (self.0 .0)(&Replica::new(replica)?)?;
            if made.len() != outputs.len() {
                let text = format!("{} outputs, and not {}", made.len(), outputs.len());
                return Err(Error::new(Code::InvalidArgument, text).into());
            }
            Ok(made)
        });
        made.map_or_else(
            |error| error,
            |made| {
                for (output, tensor) in outputs.iter_mut().zip(made) {
                    *output = tensor.map_or(TensorHandle::NULL, Tensor::release);
                }
                ErrorHandle::NULL
            },
        )
    }
}

pub(crate) type SaveValuesFn = dyn Fn() -> Result<CheckpointValues, BoxedError> + Send + Sync;
pub(crate) type LoadValuesFn = dyn Fn(&LoadedValues) -> Result<(), BoxedError> + Send + Sync;

/// The functions of a part of a checkpoint.
#[derive(Default)]
struct PartClosures {
    save_values: Option<Box<SaveValuesFn>>,
    load_values: Option<Box<LoadValuesFn>>,
}
pub(crate) struct PartFunctions(Quiet<PartClosures>);

impl PartFunctions {
    pub(crate) fn new(
        save_values: Option<Box<SaveValuesFn>>,
        load_values: Option<Box<LoadValuesFn>>,
    ) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(PartClosures { save_values, load_values }))))
    }

    pub(crate) fn save(&self, values: CheckpointValuesHandle) -> ErrorHandle {
        let saved = run("save_values", || {
            let save = self.0 .0.save_values.as_ref();
            for (name, value) in save.map_or_else(|| Ok(Default::default()), |save| save())? {
                raw::checkpoint_values_set(values, &name, &value).map_err(Error::from)?;
            }
            Ok(())
        });
        saved.err().unwrap_or(ErrorHandle::NULL)
    }

    pub(crate) fn load(&self, loaded: RawLoadedValues) -> ErrorHandle {
        let loaded = run("load_values", || match self.0 .0.load_values.as_ref() {
            Some(load) => load(&loaded.into()),
            None => Ok(()),
        });
        loaded.err().unwrap_or(ErrorHandle::NULL)
    }
}

type TellFn = dyn Fn(MemberEvent) + Send + Sync;

/// The callback for members.
pub(crate) struct MemberCallback(Quiet<Box<TellFn>>);

impl MemberCallback {
    pub(crate) fn new(tell: impl Fn(MemberEvent) + Send + Sync + 'static) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(tell)))))
    }

    pub(crate) fn tell(&self, event: RawMemberEvent) {
        let _ = catch(|| (self.0 .0)(event.into()));
    }
}

type WriteFn = dyn Fn(Severity, &str) + Send + Sync;

/// The sink of the library's log.
pub(crate) struct LogSink(Quiet<Box<WriteFn>>);

impl LogSink {
    pub(crate) fn new(write: impl Fn(Severity, &str) + Send + Sync + 'static) -> Box<Self> {
        Box::new(Self(Quiet(ManuallyDrop::new(Box::new(write)))))
    }

    pub(crate) fn write(&self, severity: u32, text: &[u8]) {
        let _ = catch(|| (self.0 .0)(severity.into(), &String::from_utf8_lossy(text)));
    }
}

type OnceFn = dyn FnOnce() + Send;

/// The callback of a future or a cancellation.
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

/// A closure that waits, once.
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
        None => Err(Error::new(Code::Internal, "dg_wait did not wait")),
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
