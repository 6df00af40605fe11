//! What a handler gets.
use crate::{
    ffi::{self, MessageHandle, RawRequest, WorkerHandle},
    message::{gap, tensor_of, text_of},
    Caller, Context, Result, Tensor,
};
use std::{
    fmt,
    mem::ManuallyDrop,
    time::{Duration, Instant},
};

/// What a handler gets: borrowed for the call.
#[doc(alias = "dg_request")]
pub struct Request<'a> {
    worker: WorkerHandle,
    function: &'a str,
    from: u32,
    message: MessageHandle,
    // The library's, which ends it.
    context: ManuallyDrop<Context<'a>>,
    // None: the caller waits for ever.
    deadline: Option<Instant>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(raw: &RawRequest<'a>) -> Self {
        let timeout = u64::try_from(raw.timeout_ms).ok().map(Duration::from_millis);
        Self {
            worker: raw.worker,
            // It is the name that it was registered under.
            function: std::str::from_utf8(raw.function).unwrap_or(""),
            from: raw.from as u32,
            message: raw.message,
            context: ManuallyDrop::new(Context::own(raw.worker, raw.context)),
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
        }
    }

    /// The name that was called.
    pub fn function(&self) -> &'a str {
        self.function
    }

    /// The rank of the worker that called.
    pub fn from(&self) -> u32 {
        self.from
    }

    /// The bytes that it sent.
    pub fn payload(&self) -> &[u8] {
        ffi::payload(self, self.message)
    }

    /// They as text; `Code::InvalidArgument` if they are not UTF-8.
    pub fn text(&self) -> Result<&str> {
        text_of(self.payload())
    }

    /// How many places for tensors the message has.
    pub fn tensor_count(&self) -> usize {
        ffi::message_tensor_count(self.message)
    }

    /// One of the tensors that it sent; errors as of [`Message::tensor`](crate::Message::tensor).
    pub fn tensor(&self, index: usize) -> Result<Tensor> {
        tensor_of(self.message, index)?.ok_or_else(|| gap(index))
    }

    /// All places, of which some may have no tensor.
    pub fn tensors(&self) -> Result<Vec<Option<Tensor>>> {
        (0..self.tensor_count()).map(|index| tensor_of(self.message, index)).collect()
    }

    /// The caller's context; `None` outside any.
    pub fn context(&self) -> Option<&Context<'a>> {
        self.context.is_some().then_some(&*self.context)
    }

    /// How long the caller still waits; `None`: for ever.
    pub fn timeout(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Calls in turn: within the caller's context, and the time that it still waits.
    pub fn caller(&self) -> Caller<'_> {
        let caller = Caller::new(self.worker, self.context.handle());
        match self.timeout() {
            Some(timeout) => caller.timeout(timeout),
            None => caller.timeout(Duration::MAX),
        }
    }
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({:?} from worker {})", self.function, self.from)
    }
}
