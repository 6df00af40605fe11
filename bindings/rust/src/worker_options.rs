//! How a worker joins a job.
use crate::{
    ffi::{self, RawDevicePair, RawWorkerOptions},
    future::not_zero_milliseconds,
    Code, Error, Limits, Result, Worker,
};
use std::{path::Path, time::Duration};

// The flags of `dg_worker_options`.
const NO_OPERATORS: u64 = 1;
const ALL_OPERATORS: u64 = 2;
const JOIN: u64 = 4;
const NO_GPU_CHANNEL: u64 = 8;

/// How a worker joins a job. What is not said has a default.
#[doc(alias = "dg_worker_options")]
#[derive(Clone, Debug, Default)]
pub struct WorkerOptions(RawWorkerOptions);

impl WorkerOptions {
    /// All default: rank, world size and rendezvous are as `DISTGRAD_RANK`, `DISTGRAD_WORLD_SIZE` and
    /// `DISTGRAD_RENDEZVOUS` in the environment say, or the launcher (torchrun, Slurm, MPI,
    /// Kubernetes); where nobody says anything, it is one worker alone. docs/launching.md.
    pub fn new() -> Self {
        Self::default()
    }
    /// Unique in the job. Default: what `DISTGRAD_NAME` in the environment says, or `worker<rank>`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.0.name = name.into();
        self
    }
    /// Its number, below `world_size`, which is how many workers the job has. Default: as the
    /// rendezvous, the environment or the launcher says.
    pub fn rank(mut self, rank: u32, world_size: u32) -> Self {
        (self.0.rank, self.0.world_size) = (rank, world_size);
        self
    }
    /// How the workers find each other: `tcp://host:port`, where worker 0 serves a store;
    /// `file:///path`, a file that all see, and that is not there from an earlier job; `env://`
    /// (the default), as `DISTGRAD_RENDEZVOUS` in the environment or the launcher says. With
    /// `?rank=1&world_size=2` where these are not given by [`rank`](WorkerOptions::rank).
    pub fn rendezvous(mut self, rendezvous: impl Into<String>) -> Self {
        self.0.rendezvous = rendezvous.into();
        self
    }
    /// `socket`; `tcp` and `shm` are TensorPipe's own. Default: what `DISTGRAD_TRANSPORT` in the
    /// environment says, or `socket`.
    pub fn transport(mut self, transport: impl Into<String>) -> Self {
        self.0.transport = transport.into();
        self
    }
    /// The address, name or interface of this machine that it listens on. Default: what
    /// `DISTGRAD_HOST` in the environment says, or the address by which this machine reaches the
    /// store; loopback, where the store or the whole job is here.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.0.host = host.into();
        self
    }
    /// A file with the secret that all workers share. Default: what `DISTGRAD_KEY_FILE` in the
    /// environment names, or the secret itself in `DISTGRAD_KEY`, or none. docs/security.md.
    pub fn key_file(mut self, key_file: impl AsRef<Path>) -> Self {
        self.0.key_file = key_file.as_ref().to_string_lossy().into_owned();
        self
    }
    /// How many handlers run at the same time. Default: as many as there are processors that the
    /// process may use.
    pub fn thread_count(mut self, thread_count: u64) -> Self {
        self.0.thread_count = thread_count;
        self
    }
    /// Of calls and passes that set none. Default: a minute.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.0.timeout_ms = not_zero_milliseconds(timeout);
        self
    }
    /// For all workers to join. Default: a minute.
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.0.join_timeout_ms = not_zero_milliseconds(timeout);
        self
    }
    /// Which operators the others may call here. Default: those that only compute.
    pub fn operators(mut self, operators: Operators) -> Self {
        self.set_flag(NO_OPERATORS, operators == Operators::None);
        self.set_flag(ALL_OPERATORS, operators == Operators::All);
        self
    }
    /// Tells jobs that share one rendezvous apart; has no `/`. Default: empty.
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.0.job = job.into();
        self
    }
    /// A peer that was not heard of for so long is lost, though its connection stands. At least
    /// 100 ms; `Duration::MAX`: never. Default: 20 seconds.
    pub fn heartbeat_limit(mut self, limit: Duration) -> Self {
        self.0.heartbeat_limit_ms = not_zero_milliseconds(limit);
        self
    }
    /// Joins a job that runs already, as one more worker: the store gives its rank, and neither rank
    /// nor world size is looked at. Under a name that it had before it comes back. Default: the
    /// worker is one of the job's start.
    #[doc(alias = "DG_WORKER_JOIN")]
    pub fn join(mut self, join: bool) -> Self {
        self.set_flag(JOIN, join);
        self
    }
    /// How many workers may ever join the job. Default: 4096.
    pub fn max_workers(mut self, max_workers: u64) -> Self {
        self.0.max_workers = max_workers;
        self
    }
    /// What it lets others, and its own program, make it hold.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.0.limits = limits.0;
        self
    }
    /// Whether large tensors on GPUs go straight to GPUs of workers that have this too, in builds
    /// with CUDA; if not, by way of the CPU. Default: yes.
    #[doc(alias = "DG_WORKER_NO_GPU_CHANNEL")]
    pub fn gpu_channel(mut self, gpu_channel: bool) -> Self {
        self.set_flag(NO_GPU_CHANNEL, !gpu_channel);
        self
    }
    /// A device of this worker's that goes with one of another's: a tensor that is on `mine` here
    /// arrives on `theirs` there, and its gradient comes back the same way. One to one for each
    /// peer, and without the CPU, which always goes with the CPU. One end of a pair may say it
    /// alone. Default: none.
    #[doc(alias = "dg_device_pair")]
    pub fn device_pair(
        mut self,
        peer: impl Into<String>,
        mine: impl Into<String>,
        theirs: impl Into<String>,
    ) -> Self {
        self.0.device_pairs.push(RawDevicePair {
            peer: peer.into(),
            mine: mine.into(),
            theirs: theirs.into(),
        });
        self
    }

    /// Joins the job, and waits until all its workers have.
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
        Ok(Worker::own(ffi::worker_create(&self.0)?))
    }

    fn set_flag(&mut self, flag: u64, on: bool) {
        self.0.flags = if on { self.0.flags | flag } else { self.0.flags & !flag };
    }
}

/// Which operators the others may call on a worker, without its having registered anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operators {
    /// Those of torch that only compute; docs/security.md has the rule.
    #[default]
    Pure,
    /// None.
    #[doc(alias = "DG_WORKER_NO_OPERATORS")]
    None,
    /// All that this process has.
    #[doc(alias = "DG_WORKER_ALL_OPERATORS")]
    All,
}
