//! How a worker joins a job.
use crate::{
    ffi::{self, RawDevicePair, RawWorkerOptions},
    future::not_zero_milliseconds,
    safetensors::text_of_path,
    Code, Error, Limits, Result, TlsOptions, Worker,
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

// The flags of `dg_worker_options`.
const NO_OPERATORS: u64 = 1;
const ALL_OPERATORS: u64 = 2;
const JOIN: u64 = 4;
const NO_GPU_CHANNEL: u64 = 8;

/// The options of a [`Worker`], each with a default.
///
/// ```no_run
/// use distgrad::WorkerOptions;
/// use std::time::Duration;
/// // What is not set here comes from the launcher, or from the environment.
/// let worker = WorkerOptions::new()
///     .key_file("job.key")
///     .join_timeout(Duration::from_secs(300))
///     .create()?;
/// println!("rank {} of {}", worker.rank(), worker.world_size());
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_worker_options")]
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions {
    raw: RawWorkerOptions, // but for what follows
    key_file: PathBuf,
    tls: TlsOptions,
}

impl WorkerOptions {
    /// All default: rank, world size and rendezvous come from `DISTGRAD_RANK`,
    /// `DISTGRAD_WORLD_SIZE` and `DISTGRAD_RENDEZVOUS` in the environment, or from the launcher
    /// (torchrun, Slurm, MPI, Kubernetes); if these say nothing, the worker is alone.
    /// docs/launching.md.
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets the name, unique in the job. Default: `DISTGRAD_NAME` in the environment, or
    /// `worker<rank>`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.raw.name = name.into();
        self
    }
    /// Sets the rank, below `world_size`, the number of workers. Default: what the rendezvous, the
    /// environment or the launcher says.
    pub fn rank(mut self, rank: u32, world_size: u32) -> Self {
        (self.raw.rank, self.raw.world_size) = (rank, world_size);
        self
    }
    /// Sets how the workers find each other: `tcp://host:port`, where worker 0 serves a store;
    /// `file:///path`, a file that all see, new for each job; `env://` (the default), as
    /// `DISTGRAD_RENDEZVOUS` in the environment or the launcher says. With `?rank=1&world_size=2`
    /// unless [`rank`](WorkerOptions::rank) sets these.
    pub fn rendezvous(mut self, rendezvous: impl Into<String>) -> Self {
        self.raw.rendezvous = rendezvous.into();
        self
    }
    /// Sets the transport: `socket`; `tcp` and `shm` are TensorPipe's own. Default:
    /// `DISTGRAD_TRANSPORT` in the environment, or `socket`.
    pub fn transport(mut self, transport: impl Into<String>) -> Self {
        self.raw.transport = transport.into();
        self
    }
    /// Sets the address, name or interface to listen on. Default: `DISTGRAD_HOST` in the
    /// environment, or the address by which this machine reaches the store, or loopback if the
    /// store or the whole job is here.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.raw.host = host.into();
        self
    }
    /// Sets a file with the secret that all workers share. Default: the one that
    /// `DISTGRAD_KEY_FILE` in the environment names, or the secret itself in `DISTGRAD_KEY`, or
    /// none. With one, TCP is encrypted. docs/security.md.
    pub fn key_file(mut self, key_file: impl AsRef<Path>) -> Self {
        self.key_file = key_file.as_ref().to_owned();
        self
    }
    /// Sets certificates, in the place of that secret or beside it, and whether sockets within the
    /// machine are encrypted. Default: as `DISTGRAD_TLS_CERT` and so on say. A
    /// [`ProcessGroup`](crate::ProcessGroup) takes those of its worker.
    pub fn tls(mut self, tls: TlsOptions) -> Self {
        self.tls = tls;
        self
    }
    /// Sets how many threads run handlers and backward at the same time. Default: one for each
    /// processor that the process may use.
    pub fn thread_count(mut self, thread_count: u64) -> Self {
        self.raw.thread_count = thread_count;
        self
    }
    /// Sets the timeout of calls and passes that set none. Default: one minute.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.raw.timeout_ms = not_zero_milliseconds(timeout);
        self
    }
    /// Sets the timeout for all workers to join. Default: one minute.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.raw.join_timeout_ms = not_zero_milliseconds(timeout);
        self
    }
    /// Sets which operators the others may call here. Default: a list of torch's.
    pub fn serve_operators(mut self, operators: ServeOperators) -> Self {
        self.set_flag(NO_OPERATORS, operators == ServeOperators::None);
        self.set_flag(ALL_OPERATORS, operators == ServeOperators::All);
        self
    }
    /// Sets a name that tells apart jobs which share one rendezvous; without `/`. Default: empty.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.raw.job = job.into();
        self
    }
    /// Sets how long a peer may be silent before it is lost, though its connection stands. At least
    /// 100 ms; `Duration::MAX`: for ever. Default: 20 seconds.
    pub fn heartbeat_limit(mut self, limit: Duration) -> Self {
        self.raw.heartbeat_limit_ms = not_zero_milliseconds(limit);
        self
    }
    /// Joins a running job as one more worker: the store gives its rank, and rank and world size
    /// are ignored. A worker that uses a former name comes back under it. docs/membership.md.
    /// Default: false.
    #[doc(alias = "DG_WORKER_JOIN")]
    pub fn join(mut self, join: bool) -> Self {
        self.set_flag(JOIN, join);
        self
    }
    /// Sets how many workers may ever join the job. Default: 4096.
    pub fn max_workers(mut self, max_workers: u64) -> Self {
        self.raw.max_workers = max_workers;
        self
    }
    /// Sets bounds on what other workers, and this program, can make it hold.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.raw.limits = limits.0;
        self
    }
    /// Sets whether large tensors on GPUs go straight to the GPUs of workers for which it is set
    /// too, in builds with CUDA; if not, they go through the CPU. docs/cuda.md. Default: true.
    #[doc(alias = "DG_WORKER_NO_GPU_CHANNEL")]
    pub fn gpu_channel(mut self, gpu_channel: bool) -> Self {
        self.set_flag(NO_GPU_CHANNEL, !gpu_channel);
        self
    }
    /// Maps a device of this worker to one of another: a tensor that is sent from `local` arrives
    /// on `remote`, and its gradient comes back the same way. One to one for each peer. The CPU always
    /// maps to the CPU and is left out. It is enough that one of the two workers gives the map.
    /// Default: none.
    #[doc(alias = "dg_device_pair")]
    pub fn device_pair(
        mut self,
        peer: impl Into<String>,
        local: impl Into<String>,
        remote: impl Into<String>,
    ) -> Self {
        self.raw.device_pairs.push(RawDevicePair {
            peer: peer.into(),
            local: local.into(),
            remote: remote.into(),
        });
        self
    }

    /// Joins the job. Waits until all its workers have joined.
    ///
    /// `Code::InvalidArgument` for options or variables that make no sense, or paths that are not
    /// UTF-8,
    /// `Code::FailedPrecondition` for an environment that lacks something, `Code::DeadlineExceeded`
    /// with the workers that did not come, `Code::AlreadyExists` if two claim one rank or name,
    /// `Code::ResourceExhausted` beyond `max_workers`, `Code::Unauthenticated` for another key than
    /// the others', or a certificate that they refuse, `Code::Unavailable` if the store is gone.
    #[doc(alias = "dg_worker_create")]
    pub fn create(&self) -> Result<Worker> {
        let loaded = ffi::abi_version() >> 16;
        if loaded != ffi::abi_major() {
            return Err(Error::new(
                Code::Unimplemented,
                format!(
                    "libdistgrad has version {loaded} of its interface, not {}",
                    ffi::abi_major()
                ),
            ));
        }
        let mut raw = self.raw.clone();
        raw.key_file = text_of_path(&self.key_file)?.to_owned();
        raw.tls = self.tls.raw()?;
        Ok(Worker::own(ffi::worker_create(&raw)?))
    }

    fn set_flag(&mut self, flag: u64, on: bool) {
        self.raw.flags = if on { self.raw.flags | flag } else { self.raw.flags & !flag };
    }
}

/// Which operators the others may call on a worker, without any registration.
///
/// ```
/// use distgrad::{ServeOperators, WorkerOptions};
/// let worker = WorkerOptions::new().serve_operators(ServeOperators::None).create()?;
/// # drop(worker);
/// # distgrad::Result::Ok(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServeOperators {
    /// A list of some 400 of torch's, which models are trained with, and of which each was reviewed
    /// for what a peer can do by it; docs/security.md says how. One that writes to its arguments is
    /// among them: the worker has copies. For others a [registered](crate::Worker::register)
    /// function can call them.
    #[default]
    Safe,
    /// None.
    #[doc(alias = "DG_WORKER_NO_OPERATORS")]
    None,
    /// All that this process has, whatever they do.
    #[doc(alias = "DG_WORKER_ALL_OPERATORS")]
    All,
}
