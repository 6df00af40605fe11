//! The library's log.
use crate::{
    ffi::{self, LogSink},
    Result,
};

/// How much a line of the log matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// What happens.
    Info,
    /// What should not happen often.
    Warning,
    /// What somebody should look at.
    Error,
}

impl From<u32> for Severity {
    fn from(severity: u32) -> Self {
        match severity {
            0 => Self::Info,
            1 => Self::Warning,
            _ => Self::Error,
        }
    }
}

/// Gives the lines that the library logs to `sink`, in the place of standard error: each without time
/// and newline. What is logged at all the environment variable `DISTGRAD_LOG` says (`INFO`,
/// `WARNING`, `ERROR` or `OFF`; `WARNING` when it is not set). Of the whole process; takes the place of
/// the one before, which is not running, nor will it, and is dropped, when this has returned.
///
/// The sink is called on any thread, several at once, the network's among them, and while the library
/// holds locks of its own: it must neither wait nor call this crate, which could wait for ever. A
/// panic in it is printed and goes no further.
///
/// ```
/// # fn f() -> distgrad::Result<()> {
/// distgrad::set_log_sink(|severity, text| eprintln!("distgrad: {severity:?}: {text}"))
/// # }
/// ```
#[doc(alias = "dg_log_set_sink")]
pub fn set_log_sink(sink: impl Fn(Severity, &str) + Send + Sync + 'static) -> Result<()> {
    Ok(ffi::log_set_sink(LogSink::new(sink))?)
}

/// The log goes to standard error again. Waits until the former sink is not running, unless it is
/// called in it.
pub fn remove_log_sink() -> Result<()> {
    Ok(ffi::log_no_sink()?)
}
