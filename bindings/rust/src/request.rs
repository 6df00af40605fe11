//! Requests, which handlers get, and responders.
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

/// The request that a handler gets, for the time of the call.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::Message;
/// worker.register("scale", |request| {
///     request.cancellation().check()?; // the caller may have given up
///     let factor: f64 = request.text()?.parse()?;
///     Ok(Message::new("", [request.tensor(0)?.mul_scalar(factor)?])?)
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_request")]
pub struct Request<'a> {
    worker: WorkerHandle,
    function: &'a str,
    from: u32,
    message: MessageHandle,
    // The library owns these two.
    context: ManuallyDrop<Context<'a>>,
    cancellation: ManuallyDrop<Cancellation>,
    // None: the caller waits without a deadline.
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

    /// Returns the name of the function.
    pub fn function(&self) -> &'a str {
        self.function
    }

    /// Returns the caller's rank.
    pub fn from(&self) -> u32 {
        self.from
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        ffi::payload(self, self.message)
    }

    /// Returns the payload as text; `Code::InvalidArgument` if it is not UTF-8.
    pub fn text(&self) -> Result<&str> {
        text_of(self.payload())
    }

    /// Returns how many places for tensors the message has.
    pub fn tensor_count(&self) -> usize {
        ffi::message_tensor_count(self.message)
    }

    /// Returns one of the tensors; errors as of [`Message::tensor`](crate::Message::tensor).
    pub fn tensor(&self, index: usize) -> Result<Tensor> {
        tensor_of(self.message, index)?.ok_or_else(|| gap(index))
    }

    /// Returns the tensors of all places; `None` for a place without one.
    pub fn tensors(&self) -> Result<Vec<Option<Tensor>>> {
        (0..self.tensor_count()).map(|index| tensor_of(self.message, index)).collect()
    }

    /// Returns the caller's context; `None` if the call was made outside any.
    pub fn context(&self) -> Option<&Context<'a>> {
        self.context.is_some().then_some(&*self.context)
    }

    /// Returns how long the caller still waits; `None`: without a deadline.
    pub fn timeout(&self) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns the cancellation token of this call, which is cancelled as soon as nobody waits for
    /// the answer: the caller gave up, or is gone.
    pub fn cancellation(&self) -> &Cancellation {
        &self.cancellation
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns a [`Caller`] for nested calls: in the caller's context, with what is left of its
    /// deadline, and cancelled with its call. The calls of this type use it.
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

/// Carries the answer of a handler that answers later: see
/// [`Worker::register_responder`](crate::Worker::register_responder).
///
/// Dropping one without an answer, also by a panic, gives the caller `Code::Internal`.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Message, Responder};
/// // On a thread of the program's own, so that none of the worker's is held.
/// fn greet(responder: Responder) {
///     std::thread::spawn(move || {
///         let greeting = format!("Hello worker {}", responder.request().from());
///         responder.answer(Message::from_payload(greeting).map_err(Into::into))
///     });
/// }
/// worker.register_responder("greet", greet)
/// # }
/// ```
#[doc(alias = "dg_responder")]
#[doc(alias = "dg_responder_destroy")]
pub struct Responder {
    // It lives no longer than the responder, and so is only lent.
    request: Request<'static>,
    responder: Owned<ResponderHandle>,
}

impl Responder {
    pub(crate) fn own(request: Request<'static>, responder: ResponderHandle) -> Self {
        Self { request, responder: Owned::new(responder) }
    }

    /// Returns the request, which lives as long as the responder.
    ///
    /// ```compile_fail,E0505
    /// # fn f(responder: distgrad::Responder) {
    /// let name = responder.request().function();
    /// drop(responder); // and with it the request
    /// println!("{name}");
    /// # }
    /// ```
    pub fn request(&self) -> &Request<'_> {
        &self.request
    }

    /// Answers, as a handler does by returning. If nobody waits for the answer any more, it is
    /// dropped, which is no error.
    #[doc(alias = "dg_responder_answer")]
    pub fn answer(self, result: HandlerResult) -> Result<()> {
        let (reply, error) = match result.map_err(|error| describe(error.as_ref())) {
            Ok(message) => (Message::release(message), ErrorHandle::NULL),
            Err(error) => (MessageHandle::NULL, ffi::error_create(&error)),
        };
        Ok(ffi::responder_answer(self.responder.release(), reply, error)?)
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({:?})", self.request)
    }
}
