//! What a worker lets itself be made to hold.
use crate::{ffi::RawLimits, future::not_zero_milliseconds};
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
pub struct Limits(pub(crate) RawLimits);

impl Limits {
    /// All default.
    pub fn new() -> Self {
        Self::default()
    }
    /// Of one message, with its tensors; and what one operator allocates that a peer calls. Default:
    /// 8 GiB.
    pub fn message_bytes(mut self, bytes: u64) -> Self {
        self.0.message_bytes = bytes;
        self
    }
    /// Of one message. Default: 16384.
    pub fn tensors_per_message(mut self, tensors: u64) -> Self {
        self.0.tensors_per_message = tensors;
        self
    }
    /// In flight to one peer, and served here of one. Default: 4096.
    pub fn calls_per_peer(mut self, calls: u64) -> Self {
        self.0.calls_per_peer = calls;
        self
    }
    /// Of all peers together. Default: 65536.
    pub fn calls(mut self, calls: u64) -> Self {
        self.0.calls = calls;
        self
    }
    /// That wait to be sent to one peer, where calls that wait for their reply wait for room; and of
    /// its calls here. Default: 4 GiB.
    pub fn bytes_per_peer(mut self, bytes: u64) -> Self {
        self.0.bytes_per_peer = bytes;
        self
    }
    /// Of one origin that are open here. Default: 4096.
    pub fn contexts_per_peer(mut self, contexts: u64) -> Self {
        self.0.contexts_per_peer = contexts;
        self
    }
    /// Connections whose handshake is not finished. Default: 256.
    pub fn unauthenticated(mut self, connections: u64) -> Self {
        self.0.unauthenticated = connections;
        self
    }
    /// How long each may take for it. Default: 10 seconds.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.0.handshake_timeout_ms = not_zero_milliseconds(timeout);
        self
    }
}
