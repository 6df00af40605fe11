//! Handles of the C interface: numbers that look like pointers, checked by the library at each use.
use super::{bridge::raw, pipeline::raw as pipeline};
use cxx::{kind::Trivial, type_id, ExternType};
use std::ffi::c_void;

/// A handle of one kind.
pub(crate) trait Handle: Copy {
    const NULL: Self;
    fn is_null(self) -> bool;
    /// Destroys it; accepts a null one.
    fn destroy(self);
}

macro_rules! handles {
    ($($name:ident, $id:literal, $destroy:expr;)*) => {$(
        /// Copies name the same object; only [`Owned`] destroys it.
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub(crate) struct $name(*mut c_void);

        // SAFETY: shim.h makes it an alias of a pointer, as it is here.
        unsafe impl ExternType for $name {
            type Id = type_id!($id);
            type Kind = Trivial;
        }
        // SAFETY: "Any function may be called on any thread at any time, unless its comment says
        // otherwise." Two kinds of functions say otherwise of a handle: those that run operators which
        // write to their arguments, which are unsafe here; and dg_tensor_require_grad, which is called
        // for tensors that no other handle refers to. The others of "Some functions write to the
        // caller's tensors" stand in the documentation of Tensor: they change elements, and never
        // where these are or how many. Indices are elements too, and say where an operator or a
        // backward reads and writes, of other tensors: that documentation has what the program is to
        // see to.
        unsafe impl Send for $name {}
        // SAFETY: the same sentence.
        unsafe impl Sync for $name {}

        impl Handle for $name {
            const NULL: Self = Self(std::ptr::null_mut());
            fn is_null(self) -> bool {
                self.0.is_null()
            }
            fn destroy(self) {
                $destroy(self)
            }
        }
    )*};
}
handles! {
    ErrorHandle, "distgrad_rust::ErrorHandle", |_| ();
    TensorHandle, "distgrad_rust::TensorHandle", raw::tensor_destroy;
    ValuesHandle, "distgrad_rust::ValuesHandle", raw::values_destroy;
    MessageHandle, "distgrad_rust::MessageHandle", raw::message_destroy;
    FutureHandle, "distgrad_rust::FutureHandle", raw::future_destroy;
    CancellationHandle, "distgrad_rust::CancellationHandle", raw::cancellation_destroy;
    ResponderHandle, "distgrad_rust::ResponderHandle", raw::responder_destroy;
    WorkerHandle, "distgrad_rust::WorkerHandle", raw::worker_destroy;
    ContextHandle, "distgrad_rust::ContextHandle", raw::context_destroy;
    OptimizerHandle, "distgrad_rust::OptimizerHandle", raw::optimizer_destroy;
    DataParallelHandle, "distgrad_rust::DataParallelHandle", raw::data_parallel_destroy;
    ProcessGroupHandle, "distgrad_rust::ProcessGroupHandle", raw::process_group_destroy;
    AveragerHandle, "distgrad_rust::AveragerHandle", raw::averager_destroy;
    SafetensorsFileHandle, "distgrad_rust::SafetensorsFileHandle", raw::safetensors_file_destroy;
    CheckpointValuesHandle, "distgrad_rust::CheckpointValuesHandle", |_| ();
    CheckpointPartHandle, "distgrad_rust::CheckpointPartHandle", raw::checkpoint_part_destroy;
    CheckpointManagerHandle, "distgrad_rust::CheckpointManagerHandle", raw::checkpoint_manager_destroy;
    ScheduleHandle, "distgrad_rust::ScheduleHandle", pipeline::schedule_destroy;
    PipelineStagesHandle, "distgrad_rust::PipelineStagesHandle", pipeline::pipeline_stages_destroy;
    PipelineHandle, "distgrad_rust::PipelineHandle", pipeline::pipeline_destroy;
    PipelineResultHandle, "distgrad_rust::PipelineResultHandle", pipeline::pipeline_result_destroy;
    PipelineStepHandle, "distgrad_rust::PipelineStepHandle", pipeline::pipeline_step_destroy;
}

impl TensorHandle {
    pub(crate) fn from_pointer(pointer: *mut c_void) -> Self {
        Self(pointer)
    }
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Destroys its handle when it is dropped.
pub(crate) struct Owned<H: Handle>(H);

impl<H: Handle> Owned<H> {
    pub(crate) fn new(handle: H) -> Self {
        Self(handle)
    }
    /// Borrows the handle, which is valid while `self` lives.
    pub(crate) fn get(&self) -> H {
        self.0
    }
    pub(crate) fn release(mut self) -> H {
        std::mem::replace(&mut self.0, H::NULL)
    }
}

impl<H: Handle> Drop for Owned<H> {
    fn drop(&mut self) {
        if !self.0.is_null() {
            self.0.destroy();
        }
    }
}
