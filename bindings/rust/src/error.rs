//! Errors: a code to act on, a text for people.
use std::{error::Error as StdError, fmt};

/// What kind of thing went wrong: the canonical codes of Abseil and gRPC.
#[doc(alias = "dg_code")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Code {
    /// Somebody ended it before it was done.
    Cancelled = 1,
    /// An error without a code, or with one that this crate does not know.
    Unknown = 2,
    /// The caller's arguments are wrong, whatever the state of things.
    InvalidArgument = 3,
    /// It took longer than it was given.
    DeadlineExceeded = 4,
    /// No function, operator, worker or gradient of that name.
    NotFound = 5,
    /// There is one of that name.
    AlreadyExists = 6,
    /// The caller may not.
    PermissionDenied = 7,
    /// A limit is reached.
    ResourceExhausted = 8,
    /// Things are not in the state that it needs.
    FailedPrecondition = 9,
    /// Another part of the same work failed.
    Aborted = 10,
    /// Beyond the end.
    OutOfRange = 11,
    /// Not there in this version.
    Unimplemented = 12,
    /// A panic, or a bug.
    Internal = 13,
    /// The other worker is gone, or not there yet.
    Unavailable = 14,
    /// What arrived is broken.
    DataLoss = 15,
    /// The other side has not proved who it is.
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

/// What went wrong, here or on another worker.
#[doc(alias = "dg_error")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: String,
    origin: Option<Origin>,
}

/// Where an error arose. It is the word of the workers that it came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The rank of the worker.
    pub rank: u32,
    /// Whether distgrad or a handler gave it there.
    pub kind: OriginKind,
}

/// What gave an error: distgrad or a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u32)]
pub enum OriginKind {
    /// distgrad, or an operator or optimizer of torch that it ran.
    Distgrad = 1,
    /// A handler returned it, or panicked.
    Handler = 2,
}

/// What fails with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What handlers and other callbacks fail with: any error.
pub(crate) type BoxedError = Box<dyn StdError + Send + Sync + 'static>;

impl Error {
    /// One for a handler to return: its caller gets this code, and a text with this message in it.
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

    /// What a program acts on.
    #[doc(alias = "dg_error_code")]
    pub fn code(&self) -> Code {
        self.code
    }

    /// For people, not for programs to parse.
    #[doc(alias = "dg_error_message")]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// On which worker it arose, and whether a handler gave it or distgrad; `None` where it was on no
    /// worker. A handler that returns the error that a call of its own gave keeps that.
    ///
    /// ```
    /// # fn f(context: &distgrad::Context, request: &distgrad::Message) {
    /// use distgrad::{Code, OriginKind};
    /// if let Err(error) = context.call("back", "find", request) {
    ///     let by_handler = error.origin().is_some_and(|o| o.kind == OriginKind::Handler);
    ///     if error.code() == Code::NotFound && by_handler {
    ///         // The handler was found, and has not found it.
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

/// As shim.h writes it: the code is the first character, and origin and rank come before the message.
impl From<cxx::Exception> for Error {
    fn from(exception: cxx::Exception) -> Self {
        let text = exception.what();
        let Some(code @ '@'..='P') = text.chars().next() else {
            return Self::new(Code::Internal, text);
        };
        let mut parts = text[1..].splitn(3, ' ');
        let mut number = || parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
        let (origin, rank) = (number(), number());
        Self::new((code as i32 - '@' as i32).into(), parts.next().unwrap_or(""))
            .with_origin(origin, rank)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.code)
    }
}

impl StdError for Error {}

/// What a caller gets of what a handler returned.
pub(crate) fn describe(error: &(dyn StdError + 'static)) -> Error {
    match error.downcast_ref::<Error>() {
        Some(error) => error.clone(),
        None => Error::new(Code::Unknown, error.to_string()),
    }
}
