//! The options of a worker, as they cross to C++ (worker_options.cc).
use super::handle::WorkerHandle;

#[cxx::bridge(namespace = "distgrad_rust")]
pub(crate) mod raw {
    /// `dg_worker_options`, but for its size.
    #[derive(Clone, Debug, Default)]
    struct RawWorkerOptions {
        name: String,
        rank: u32,
        world_size: u32,
        rendezvous: String,
        transport: String,
        host: String,
        key_file: String,
        thread_count: u64,
        timeout_ms: i64,
        join_timeout_ms: i64,
        flags: u64,
        job: String,
        heartbeat_limit_ms: i64,
        max_workers: u64,
        limits: RawLimits,
        device_pairs: Vec<RawDevicePair>,
        tls: RawTlsOptions,
    }

    /// `dg_tls_options`, but for its size.
    #[derive(Clone, Debug, Default, PartialEq, Eq)]
    struct RawTlsOptions {
        cert: String,
        key: String,
        ca: String,
        name: String,
        flags: u64,
    }

    /// `dg_limits`, but for its size.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct RawLimits {
        message_bytes: u64,
        tensors_per_message: u64,
        calls_per_peer: u64,
        calls: u64,
        bytes_per_peer: u64,
        contexts_per_peer: u64,
        unauthenticated_connections: u64,
        handshake_timeout_ms: i64,
    }

    /// `dg_device_pair`, but for its size.
    #[derive(Clone, Debug)]
    struct RawDevicePair {
        peer: String,
        local: String,
        remote: String,
    }

    unsafe extern "C++" {
        include!("distgrad/src/ffi/shim.h");

        type WorkerHandle = super::WorkerHandle;

        fn worker_create(options: &RawWorkerOptions) -> Result<WorkerHandle>;
    }
}
