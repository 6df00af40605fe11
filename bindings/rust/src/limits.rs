//! What a worker lets itself be made to hold.
use crate::{ffi::RawLimits, future::milliseconds_or_default};
use std::time::Duration;

/// What a worker lets others, and its own program, make it hold. Past one of these a call fails with
/// `Code::ResourceExhausted` and the limit's name. What is not said, or is 0, has a default.
///
/// ```
/// let limits = distgrad::Limits::new().calls_per_peer(100);
/// # let _ = distgrad::WorkerOptions::new().limits(limits);
/// ```
#[doc(alias = "dg_limits")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    message_bytes: u64,
    tensors_per_message: u64,
    calls_per_peer: u64,
    calls: u64,
    bytes_per_peer: u64,
    contexts_per_peer: u64,
    unauthenticated: u64,
    handshake_timeout: Option<Duration>,
}

impl Limits {
    /// All default.
    pub fn new() -> Self {
        Self::default()
    }
    /// Of one message, with its tensors; and what one operator allocates that a peer calls. Default:
    /// 8 GiB.
    pub fn message_bytes(mut self, bytes: u64) -> Self {
        self.message_bytes = bytes;
        self
    }
    /// Of one message. Default: 16384.
    pub fn tensors_per_message(mut self, tensors: u64) -> Self {
        self.tensors_per_message = tensors;
        self
    }
    /// In flight to one peer, and served here of one. Default: 4096.
    pub fn calls_per_peer(mut self, calls: u64) -> Self {
        self.calls_per_peer = calls;
        self
    }
    /// Of all peers together. Default: 65536.
    pub fn calls(mut self, calls: u64) -> Self {
        self.calls = calls;
        self
    }
    /// That wait to be sent to one peer, where calls that wait for their reply wait for room; and of
    /// its calls here. Default: 4 GiB.
    pub fn bytes_per_peer(mut self, bytes: u64) -> Self {
        self.bytes_per_peer = bytes;
        self
    }
    /// Of one origin that are open here. Default: 4096.
    pub fn contexts_per_peer(mut self, contexts: u64) -> Self {
        self.contexts_per_peer = contexts;
        self
    }
    /// Strangers whose handshake is not finished. Default: 256.
    pub fn unauthenticated(mut self, strangers: u64) -> Self {
        self.unauthenticated = strangers;
        self
    }
    /// How long each may take for it. Default: 10 seconds.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = Some(timeout);
        self
    }

    pub(crate) fn raw(&self) -> RawLimits {
        RawLimits {
            message_bytes: self.message_bytes,
            tensors_per_message: self.tensors_per_message,
            calls_per_peer: self.calls_per_peer,
            calls: self.calls,
            bytes_per_peer: self.bytes_per_peer,
            contexts_per_peer: self.contexts_per_peer,
            unauthenticated: self.unauthenticated,
            handshake_timeout_ms: milliseconds_or_default(self.handshake_timeout),
        }
    }
}
