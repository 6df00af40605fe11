//! Errors: a code to act on, a text for people.
use std::{error::Error as StdError, fmt};

/// What kind of thing went wrong: the canonical codes of Abseil and gRPC.
///
/// ```
/// use distgrad::Code;
/// let error = distgrad::op("aten::no_such_operator", &[]).unwrap_err();
/// assert_eq!(error.code(), Code::NotFound);
/// # fn go_on(error: &distgrad::Error) -> bool {
/// match error.code() {
///     Code::Unavailable | Code::DeadlineExceeded => true, // worth another try
///     _ => false,
/// }
/// # }
/// # assert!(!go_on(&error));
/// ```
#[doc(alias = "dg_code")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Code {
    /// It was cancelled before it was done.
    Cancelled = 1,
    /// An error without a code, or with one that this crate does not know.
    Unknown = 2,
    /// The arguments are wrong, whatever the state of things.
    InvalidArgument = 3,
    /// It took longer than it was given.
    DeadlineExceeded = 4,
    /// No function, operator, worker or gradient of that name.
    NotFound = 5,
    /// There is one of that name already.
    AlreadyExists = 6,
    /// The caller is not allowed to do this.
    PermissionDenied = 7,
    /// A limit is reached.
    ResourceExhausted = 8,
    /// The state of the system does not allow it: the context is released, for instance.
    FailedPrecondition = 9,
    /// Another part of the same work failed.
    Aborted = 10,
    /// An index or a number beyond its range.
    OutOfRange = 11,
    /// This version does not support it.
    Unimplemented = 12,
    /// A panic, or a bug.
    Internal = 13,
    /// The other worker is gone, is leaving, or cannot be reached.
    Unavailable = 14,
    /// Data is damaged, or incomplete.
    DataLoss = 15,
    /// The other side has another cluster key, or none.
    Unauthenticated = 16,
}

impl From<i32> for Code {
    fn from(code: i32) -> Self {
        use Code::*;
        const CODES: [Code; 16] = [
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
            Unauthenticated,
        ];
        CODES.into_iter().find(|&known| known as i32 == code).unwrap_or(Unknown)
    }
}

/// An error, which arose here or on another worker.
///
/// ```
/// # fn f(worker: &distgrad::Worker) -> distgrad::Result<()> {
/// use distgrad::{Code, Error, Message};
/// worker.register("find", |request| match request.text()? {
///     "x" => Ok(Message::from_payload("here")?),
///     other => Err(Error::new(Code::NotFound, format!("there is no {other}")).into()),
/// })?;
/// if let Err(error) = worker.call("back", "find", &Message::from_payload("y")?) {
///     eprintln!("{:?}: {}", error.code(), error.message()); // with the names of function and worker
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "dg_error")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: String,
    origin: Option<Origin>,
}

/// Where an error arose. It is what the peers say, not a proof.
///
/// ```
/// use distgrad::{Code, Error, Message, Origin, OriginKind, WorkerOptions};
/// let worker = WorkerOptions::new().name("alone").create()?;
/// worker.register("find", |_| Err(Error::new(Code::NotFound, "there is no such key").into()))?;
/// let error = worker.call("alone", "find", &Message::empty()?).unwrap_err();
/// assert_eq!(error.origin(), Some(Origin { rank: 0, kind: OriginKind::Handler }));
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The rank of the worker.
    pub rank: u32,
    /// Whether distgrad or a handler gave it there.
    pub kind: OriginKind,
}

/// What gave an error: distgrad or a handler.
///
/// ```
/// use distgrad::{Code, Message, OriginKind, WorkerOptions};
/// let worker = WorkerOptions::new().name("alone").create()?;
/// let error = worker.call("alone", "find", &Message::empty()?).unwrap_err();
/// assert_eq!(error.code(), Code::NotFound); // and no handler has said so:
/// assert_eq!(error.origin().unwrap().kind, OriginKind::Distgrad);
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum OriginKind {
    /// distgrad, or an operator or optimizer of torch that it ran.
    Distgrad = 1,
    /// A handler returned it, or panicked.
    Handler = 2,
}

/// A result whose error is an [`Error`].
///
/// ```
/// fn mean(numbers: &[f32]) -> distgrad::Result<f32> {
///     let x = distgrad::Tensor::from_slice(numbers, &[numbers.len() as i64])?;
///     x.mean()?.item()
/// }
/// assert_eq!(mean(&[1.0, 3.0])?, 2.0);
/// # distgrad::Result::Ok(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// The error of handlers and other callbacks: any error.
pub(crate) type BoxedError = Box<dyn StdError + Send + Sync + 'static>;

impl Error {
    /// Creates an error for a handler to return: its caller gets this code, and a text that
    /// contains this message.
    #[doc(alias = "dg_error_create")]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), origin: None }
    }
    pub(crate) fn with_origin(mut self, origin: u32, rank: u32) -> Self {
        let kind = match origin {
            1 => OriginKind::Distgrad,
            2 => OriginKind::Handler,
            _ => return self,
        };
        self.origin = Some(Origin { rank, kind });
        self
    }
    /// `DG_ORIGIN_...`, and the rank.
    pub(crate) fn raw_origin(&self) -> (u32, u32) {
        self.origin.map_or((0, 0), |origin| (origin.kind as u32, origin.rank))
    }

    /// Returns the code, for a program to act on.
    #[doc(alias = "dg_error_code")]
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns a text for people, not for programs to parse.
    #[doc(alias = "dg_error_message")]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the worker on which it arose, and whether a handler gave it or distgrad; `None` if
    /// it arose on no worker. An error keeps its origin on its way through nested calls, as long as
    /// each handler returns the error that it got, or one whose
    /// [`source`](std::error::Error::source) it is.
    ///
    /// ```
    /// # fn f(context: &distgrad::Context, request: &distgrad::Message) {
    /// use distgrad::{Code, OriginKind};
    /// if let Err(error) = context.call("back", "find", request) {
    ///     let by_handler = error.origin().is_some_and(|o| o.kind == OriginKind::Handler);
    ///     if error.code() == Code::NotFound && by_handler {
    ///         // The function was found, and its handler has not found something.
    ///     }
    /// }
    /// # }
    /// ```
    #[doc(alias = "dg_error_origin")]
    #[doc(alias = "dg_error_create_with_origin")]
    pub fn origin(&self) -> Option<Origin> {
        self.origin
    }

    pub(crate) fn unknown_kind(kind: u64) -> Self {
        Self::new(
            Code::Unimplemented,
            format!("a value of a kind ({kind}) that is newer than this crate"),
        )
    }
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }
    pub(crate) fn precondition(message: impl Into<String>) -> Self {
        Self::new(Code::FailedPrecondition, message)
    }
}

/// What the bridge to C++ throws. By a trait of the crate's own, so that the bridge's types are no
/// part of its interface, and their version may change.
mod thrown {
    use super::{Code, Error};

    pub trait Thrown {
        fn into_error(self) -> Error;
    }

    /// Reads what shim.h writes: the code is the first character, and origin and rank come before
    /// the message.
    impl Thrown for cxx::Exception {
        fn into_error(self) -> Error {
            let text = self.what();
            let Some(code @ '@'..='P') = text.chars().next() else {
                return Error::new(Code::Internal, text);
            };
            let mut parts = text[1..].splitn(3, ' ');
            let mut number = || parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
            let (origin, rank) = (number(), number());
            Error::new((code as i32 - '@' as i32).into(), parts.next().unwrap_or(""))
                .with_origin(origin, rank)
        }
    }
}

#[doc(hidden)]
impl<T: thrown::Thrown> From<T> for Error {
    fn from(thrown: T) -> Self {
        thrown.into_error()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.code)
    }
}

impl StdError for Error {}

/// Converts what a handler returned to what its caller gets: code and origin of the first [`Error`]
/// on the way to what it comes of, and the texts of all.
pub(crate) fn describe(error: &(dyn StdError + 'static)) -> Error {
    if let Some(error) = error.downcast_ref::<Error>() {
        return error.clone();
    }
    let mut text = error.to_string();
    let mut found: Option<&Error> = None;
    for source in std::iter::successors(error.source(), |&source| source.source()) {
        let own = source.downcast_ref::<Error>();
        let said = own.map_or_else(|| source.to_string(), |own| own.message.clone());
        found = found.or(own);
        // Some say themselves what they come of.
        if !text.contains(&said) {
            text += ": ";
            text += &said;
        }
    }
    Error {
        code: found.map_or(Code::Unknown, Error::code),
        message: text,
        origin: found.and_then(Error::origin),
    }
}
