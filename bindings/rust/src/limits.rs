//! Limits of a worker.
use crate::{ffi::RawLimits, future::not_zero_milliseconds};
use std::time::Duration;

/// Bounds on what other workers, and this program, can make a worker hold. Beyond one of them a
/// call fails with `Code::ResourceExhausted` and the limit's name. A limit that is not set, or set
/// to 0, has its default.
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
    /// Sets the bytes of one message with its tensors, and of what one operator allocates for a
    /// peer. Default: 8 GiB.
    pub fn message_bytes(mut self, bytes: u64) -> Self {
        self.0.message_bytes = bytes;
        self
    }
    /// Sets the tensors of one message. Default: 16384.
    pub fn tensors_per_message(mut self, tensors: u64) -> Self {
        self.0.tensors_per_message = tensors;
        self
    }
    /// Sets the calls in flight to one peer, and served here for one. Default: 4096.
    pub fn calls_per_peer(mut self, calls: u64) -> Self {
        self.0.calls_per_peer = calls;
        self
    }
    /// Sets the calls of all peers together. Default: 65536.
    pub fn calls(mut self, calls: u64) -> Self {
        self.0.calls = calls;
        self
    }
    /// Sets the bytes that wait to be sent to one peer, and those of its calls here. Where so many
    /// wait to be sent, a call that waits for its reply waits for credit (backpressure), and
    /// `call_async` fails. Default: 4 GiB.
    pub fn bytes_per_peer(mut self, bytes: u64) -> Self {
        self.0.bytes_per_peer = bytes;
        self
    }
    /// Sets the contexts of one origin that are open here. Default: 4096.
    pub fn contexts_per_peer(mut self, contexts: u64) -> Self {
        self.0.contexts_per_peer = contexts;
        self
    }
    /// Sets the number of connections whose handshake is not finished. Default: 256.
    pub fn unauthenticated_connections(mut self, connections: u64) -> Self {
        self.0.unauthenticated_connections = connections;
        self
    }
    /// Sets the timeout of the handshake of one connection, in which a peer also has to close one
    /// that is refused or given up; at least 1 ms. Default: 10 seconds.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.0.handshake_timeout_ms = not_zero_milliseconds(timeout);
        self
    }
}
