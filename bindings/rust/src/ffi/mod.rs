//! All that is unsafe: the bridge to C++, and memory that torch and Rust share. What makes each
//! use sound is a sentence of `distgrad.h`, which stands beside it.
mod bridge;
mod callback;
mod handle;
mod memory;
mod operator;
mod pipeline;
#[cfg(feature = "tch")]
mod tch;
mod value;
mod worker_options;

#[cfg(feature = "tch")]
pub use self::tch::check_one_libtorch;
pub(crate) use bridge::raw::*;
pub(crate) use callback::{
    error_create, park, wait, Callback, Forward, Handler, LoadValuesFn, LogSink, MemberCallback,
    PartFunctions, ResponderHandler, SaveValuesFn,
};
pub(crate) use handle::{
    Handle, Owned, PipelineHandle, PipelineResultHandle, PipelineStagesHandle, PipelineStepHandle,
    ScheduleHandle,
};
pub(crate) use memory::payload;
pub use memory::DlpackTensor;
pub(crate) use operator::op_of_table;
pub use operator::{op, op_unchecked, ops, ops_unchecked, OPERATORS_IN_PLACE};
pub(crate) use pipeline::{raw as raw_pipeline, StageClosures, StageTable, Timer};
pub(crate) use value::{take_values, with_raw};
pub(crate) use worker_options::raw::{
    worker_create, RawDevicePair, RawLimits, RawTlsOptions, RawWorkerOptions,
};
