//! Trains one model across threads, processes and machines, from Rust.
//!
//! ```
//! use distgrad::{Message, Tensor, WorkerOptions};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let store = std::env::temp_dir().join(format!("distgrad-doc-{}", std::process::id()));
//! # let rendezvous = format!("file://{}", store.display());
//! // A job of two workers: here on two threads, usually in processes on several machines.
//! let options = WorkerOptions::new().rendezvous(rendezvous);
//! std::thread::scope(|scope| {
//!     let back = scope.spawn(|| {
//!         let worker = options.clone().name("back").rank(1, 2).create()?;
//!         worker.register("square", |request| {
//!             Ok(Message::new("", [request.tensor(0)?.square()?])?)
//!         })?;
//!         worker.barrier(Duration::from_secs(60))?; // from here on it may be called
//!         worker.serve()
//!     });
//!
//!     let worker = options.clone().name("front").rank(0, 2).create()?;
//!     worker.barrier(Duration::from_secs(60))?;
//!     let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0], &[3])?.require_grad()?;
//!     let context = worker.context()?; // one training step
//!     let reply = context.call("back", "square", &Message::new("", [&x])?)?;
//!     context.backward([reply.tensor(0)?.sum()?])?; // through both workers
//!     assert_eq!(context.gradient(&x)?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
//!     drop(context);
//!     worker.shutdown(None)?;
//!     back.join().expect("no panic")
//! })?;
//! # let _ = std::fs::remove_file(store);
//! # Ok(())
//! # }
//! ```
//!
//! # Concepts
//!
//! - A [`Worker`] is a named member of a job. It calls functions that others have
//!   [registered](Worker::register), tensors in and tensors out, and [operators](Worker::call_op),
//!   which need no registration. A closure is a handler; its error or panic becomes an error of the
//!   caller.
//! - Calls made inside a [`Context`] are recorded, and one [`backward`](Context::backward) runs
//!   through every worker that took part. Gradients belong to the context, not to the tensors, so
//!   many contexts may be in flight at the same time.
//! - An [`Optimizer`] steps the parameters of all workers from a context's gradients.
//! - A [`Pipeline`] runs batches through a model in [stages](PipelineStages), which are on several
//!   workers: a batch is cut into micro-batches, which follow each other by a [`Schedule`].
//! - A [`DataParallel`] runs a function on several devices of one machine, each with a part of the
//!   batch. A [`GradientAverager`] does data parallel across the processes of a [`ProcessGroup`]: it averages
//!   the gradients of their contexts.
//! - A [`CheckpointManager`] saves and loads the state of a whole job: what the
//!   [`CheckpointPart`]s of its workers have. [`save_safetensors`] and [`load_safetensors`] are for
//!   files of tensors.
//! - A [`Tensor`] is torch's. All of torch's operators are there by name ([`op`]), common ones as
//!   methods, and autograd records them.
//! - A [`Future`] is the outcome of work in flight: await it, or wait for it with a timeout.
//!
//! # Threads and deadlines
//!
//! Everything here may be used and dropped on any thread, in any order, except that a [`NoGrad`]
//! or [`EnableGrad`] stays on its thread and a [`DlpackTensor`] is used by one thread at a time.
//! Calls, passes, joining and collectives have deadlines; barriers, shutdown and closing take a
//! timeout.
//!
//! # Features
//!
//! - `tch`: `tch::Tensor`s from and to [`Tensor`]s, without a copy and with their autograd graph, so
//!   that models written with tch train across workers.
//! - `ndarray`: conversions between `ndarray`'s arrays and [`Tensor`]s.
//!
//! # The library
//!
//! The crate stands on `libdistgrad`, which it finds by `DISTGRAD_DIR` (an installed tree), or by
//! pkg-config. README.md has the details.
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]
#![deny(unsafe_code)]

#[cfg(all(distgrad_missing, not(doc)))]
compile_error!(
    "libdistgrad was not found. Unpack a release, or install it (tools/bazel \
     run //capi:install -- PREFIX), and either set DISTGRAD_DIR=PREFIX or put PREFIX/lib/pkgconfig \
     on PKG_CONFIG_PATH; then build again. The warnings of build.rs say what was tried."
);

mod call;
mod calls;
mod cancellation;
mod checkpoint;
mod context;
mod element;
mod error;
#[allow(unsafe_code)]
mod ffi;
mod future;
mod group;
mod limits;
mod log;
mod message;
#[cfg(feature = "ndarray")]
mod ndarray;
mod ops;
mod optimizer;
mod parallel;
mod pipeline;
mod request;
mod safetensors;
mod state;
mod tensor;
mod tls_options;
mod value;
mod waker_slot;
mod worker;
mod worker_options;

/// What `waker_slot.rs` locks with; the tests in bindings/rust/loom put loom's types here.
mod sync {
    pub(crate) use std::sync::{Arc, Mutex};
}

pub use call::Caller;
pub use calls::Calls;
pub use cancellation::{CallbackId, Cancellation};
pub use checkpoint::{
    load_checkpoint, CheckpointContents, CheckpointManager, CheckpointManagerOptions,
    CheckpointPart, CheckpointValues, LoadOptions, LoadedCheckpoint, LoadedValues,
};
pub use context::{BackwardOptions, Context};
pub use element::{Dtype, Element};
pub use error::{Code, Error, Origin, OriginKind, Result};
#[cfg(feature = "tch")]
#[doc(hidden)]
pub use ffi::check_one_libtorch;
pub use ffi::DlpackTensor;
#[doc(hidden)]
pub use ffi::OPERATORS_IN_PLACE;
pub use ffi::{op, op_unchecked, ops, ops_unchecked};
pub use future::{Awaiting, Future};
pub use group::{GradientAverager, GradientAveragerOptions, ProcessGroup, ProcessGroupOptions};
pub use limits::Limits;
pub use log::{remove_log_sink, set_log_sink, Severity};
pub use message::Message;
#[doc(hidden)]
pub use ops::OPERATORS;
pub use optimizer::{Adam, Optimizer, Sgd};
pub use parallel::{
    broadcast, gather, reduce_add, scatter, DataParallel, DataParallelOptions, Replica,
};
pub use pipeline::{
    Action, ActionKind, MicroBatch, Pipeline, PipelineOptions, PipelineResult, PipelineRunOptions,
    PipelineStage, PipelineStages, PipelineStagesOptions, PipelineStep, Reduction, Schedule,
    ScheduleData, StageSpan, Timeline,
};
pub use request::{Request, Responder};
pub use safetensors::{
    load_safetensors, load_safetensors_into, save_safetensors, SafetensorsFile, SafetensorsInfo,
};
pub use state::{ContextState, Member, MemberEvent, MemberEventKind, OnLost, PassState};
pub use tensor::{EnableGrad, NoGrad, Tensor};
pub use tls_options::TlsOptions;
pub use value::{Scalar, Value};
pub use worker::{HandlerResult, Worker};
pub use worker_options::{ServeOperators, WorkerOptions};

/// Calls `wait` on this thread and returns its result; in a handler, other handlers may run
/// meanwhile in its place. For handlers that wait for something which is not distgrad's, a lock or
/// a channel, and which other handlers may have to bring about.
///
/// ```
/// # fn f(worker: &distgrad::Worker, gate: std::sync::mpsc::Receiver<()>) -> distgrad::Result<()> {
/// # let gate = std::sync::Mutex::new(gate);
/// worker.register("pass", move |_| {
///     distgrad::wait(|| gate.lock().unwrap().recv())??;
///     Ok(distgrad::Message::from_payload("")?)
/// })
/// # }
/// ```
///
/// `Code::FailedPrecondition`, without a call of `wait`, in a callback of [`Future::then`] and in
/// destructors of what the library holds, where it could wait for ever for its own thread.
#[doc(alias = "dg_wait")]
pub fn wait<T>(wait: impl FnOnce() -> T) -> Result<T> {
    ffi::wait(wait)
}

/// Seeds torch's random number generators, of all devices of this process: operators on one thread
/// give the same numbers after the same seed.
///
/// ```
/// use distgrad::Tensor;
/// distgrad::manual_seed(7)?;
/// let first = Tensor::rand(&[3])?.to_vec::<f32>()?;
/// distgrad::manual_seed(7)?;
/// assert_eq!(Tensor::rand(&[3])?.to_vec::<f32>()?, first);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_manual_seed")]
pub fn manual_seed(seed: u64) -> Result<()> {
    Ok(ffi::manual_seed(seed)?)
}

/// Sets how many threads one operator on the CPU may use, on this thread and on threads that have
/// not run an operator yet: so call it first. Where torch parallelizes by OpenMP (as its releases
/// do), each thread that runs operators has so many of them.
///
/// `Code::InvalidArgument` for 0, and for more than 1024.
///
/// ```
/// distgrad::set_num_threads(1)?; // for one of as many processes as the machine has cores
/// assert_eq!(distgrad::num_threads(), 1);
/// # distgrad::Result::Ok(())
/// ```
#[doc(alias = "dg_set_num_threads")]
pub fn set_num_threads(count: u32) -> Result<()> {
    Ok(ffi::set_num_threads(count)?)
}

/// Returns how many threads one operator on this thread may use. Torch's default: one for each
/// core, or `OMP_NUM_THREADS`.
///
/// ```
/// println!("an operator may use {} threads", distgrad::num_threads());
/// # assert!(distgrad::num_threads() > 0);
/// ```
#[doc(alias = "dg_num_threads")]
pub fn num_threads() -> u32 {
    ffi::num_threads()
}

/// Returns whether operators on this thread are recorded for backward; see [`NoGrad`].
///
/// ```
/// assert!(distgrad::grad_enabled());
/// let _no_grad = distgrad::NoGrad::new();
/// assert!(!distgrad::grad_enabled());
/// ```
#[doc(alias = "dg_grad_enabled")]
pub fn grad_enabled() -> bool {
    ffi::grad_enabled()
}

/// Reports to the launcher why this process fails, if the launcher asks for that: torchrun's
/// summary then has code and message. Only the first report of a process counts. docs/launching.md,
/// "torchrun".
///
/// ```no_run
/// # fn train() -> distgrad::Result<()> { Ok(()) }
/// fn main() -> distgrad::Result<()> {
///     train().inspect_err(|failure| drop(distgrad::report_failure(failure)))
/// }
/// ```
///
/// An error if the report cannot be written.
#[doc(alias = "dg_report_failure")]
pub fn report_failure(failure: &Error) -> Result<()> {
    Ok(ffi::report_failure(failure.code() as i32, failure.message())?)
}

/// Returns the version of the libtorch that the library was built with: "2.11.0".
///
/// ```
/// println!("distgrad runs on libtorch {}", distgrad::torch_version());
/// # assert!(distgrad::torch_version().starts_with("2."));
/// ```
#[doc(alias = "dg_torch_version")]
pub fn torch_version() -> &'static str {
    std::str::from_utf8(ffi::torch_version()).unwrap_or("")
}
