//! What a handler gets.
use crate::{
    error::describe,
    ffi::{
        self, ErrorHandle, Handle, MessageHandle, Owned, RawRequest, ResponderHandle, WorkerHandle,
    },
    message::{gap, tensor_of, text_of},
    Caller, Cancellation, Context, HandlerResult, Message, Result, Tensor,
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
    // These two are the library's, which ends them.
    context: ManuallyDrop<Context<'a>>,
    cancellation: ManuallyDrop<Cancellation>,
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
            cancellation: ManuallyDrop::new(Cancellation::own(raw.cancellation)),
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

    /// Cancelled as soon as nobody waits for the answer: the caller gave up, or is gone.
    pub fn cancellation(&self) -> &Cancellation {
        &self.cancellation
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Calls in turn: within the caller's context and the time that it still waits, and given up
    /// with its call.
    pub fn caller(&self) -> Caller<'_> {
        let caller = Caller::new(self.worker, self.context.handle());
        let caller = caller.cancellation(&self.cancellation);
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

/// A request whose answer comes later: see [`Worker::register_later`](crate::Worker::register_later).
///
/// One that is dropped without an answer, by a panic too, gives the caller `Code::Internal`.
#[doc(alias = "dg_responder")]
#[doc(alias = "dg_responder_destroy")]
pub struct Later {
    // Not for longer than the responder, and so lent only.
    request: Request<'static>,
    responder: Owned<ResponderHandle>,
}

impl Later {
    pub(crate) fn own(request: Request<'static>, responder: ResponderHandle) -> Self {
        Self { request, responder: Owned::new(responder) }
    }

    /// What is asked for.
    ///
    /// ```compile_fail,E0505
    /// # fn f(later: distgrad::Later) {
    /// let name = later.request().function();
    /// drop(later); // and with it the request
    /// println!("{name}");
    /// # }
    /// ```
    pub fn request(&self) -> &Request<'_> {
        &self.request
    }

    /// Answers as a handler returns. Where nobody waits for it any more, the answer is dropped, and
    /// that is no error.
    #[doc(alias = "dg_responder_answer")]
    pub fn answer(self, result: HandlerResult) -> Result<()> {
        let (reply, error) = match result.map_err(|error| describe(error.as_ref())) {
            Ok(message) => (Message::release(message), ErrorHandle::NULL),
            Err(error) => (MessageHandle::NULL, ffi::error_create(&error)),
        };
        Ok(ffi::responder_answer(self.responder.release(), reply, error)?)
    }
}

impl fmt::Debug for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Later({:?})", self.request)
    }
}
