//! The library's log.
use crate::{
    ffi::{self, LogSink},
    Result,
};

/// The severity of a line of the log.
///
/// ```
/// # fn f() -> distgrad::Result<()> {
/// use distgrad::Severity;
/// distgrad::set_log_sink(|severity, text| {
///     if severity >= Severity::Error {
///         eprintln!("distgrad: {text}");
///     }
/// })
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Something normal happened.
    Info,
    /// Something happened that should not happen often.
    Warning,
    /// Something happened that somebody should look at.
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

/// Passes the lines that the library logs to `sink`, without time and newline, instead of writing
/// them to standard error. Which lines are logged is up to the environment variable `DISTGRAD_LOG`
/// (`INFO`, `WARNING`, `ERROR` or `OFF`; `WARNING` when it is not set). The process has one sink,
/// and a new one replaces the former: when this has returned, the former does not run and is not
/// called again, and is dropped. Waits for that, but not if it is called in a sink.
///
/// The sink is called on any thread, on several at once, also on the network's, and while the
/// library holds locks of its own: it must neither wait nor call this crate. A panic in it is
/// printed and goes no further.
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

/// Has the log written to standard error again. Waits until the former sink does not run, but not
/// if it is called in a sink.
///
/// ```
/// distgrad::set_log_sink(|_, text| println!("{text}"))?;
/// // ...
/// distgrad::remove_log_sink()?;
/// # distgrad::Result::Ok(())
/// ```
pub fn remove_log_sink() -> Result<()> {
    Ok(ffi::log_no_sink()?)
}
