//! What crosses to C++ (shim.h), and what C++ calls here.
use super::{
    callback::{
        Callback, Forward, Handler, LogSink, MemberCallback, Owner, PartFunctions,
        ResponderHandler, Waiting,
    },
    handle::*,
    value::RawValue,
};

#[cxx::bridge(namespace = "distgrad_rust")]
pub(crate) mod raw {
    /// `dg_member`.
    struct RawMember {
        name: String,
        rank: u64,
        incarnation: u64,
    }

    /// `dg_member_event`.
    struct RawMemberEvent {
        kind: u64,
        name: String,
        rank: u64,
        incarnation: u64,
        reason: String,
    }

    /// `dg_pass_state`.
    struct RawPassState {
        id: u64,
        flags: u64,
        busy: u64,
        awaited: Vec<u32>,
        unacknowledged: Vec<u32>,
    }

    /// `dg_context_state`.
    struct RawContextState {
        id: u64,
        sends: u64,
        receives: u64,
        gradients: u64,
        peers: Vec<u32>,
        passes: Vec<RawPassState>,
    }

    /// `dg_request`, and the worker that serves it.
    struct RawRequest<'a> {
        worker: WorkerHandle,
        function: &'a [u8],
        from: u64,
        message: MessageHandle,
        context: ContextHandle,
        timeout_ms: i64,
        cancellation: CancellationHandle,
    }

    /// `dg_call_options`, but for its size.
    struct RawCallOptions {
        context: ContextHandle,
        timeout_ms: i64,
        cancellation: CancellationHandle,
    }

    /// What one of several workers answered: a message, or an error.
    struct RawReply {
        message: MessageHandle,
        code: i32,
        error: String,
        origin: u32,
        rank: u32,
    }

    /// A part of an optimizer's state.
    struct RawNamedTensor {
        name: String,
        tensor: TensorHandle,
    }

    /// `dg_data_parallel_options`, but for its size.
    struct RawDataParallelOptions<'a> {
        devices: &'a [&'a str],
        output_device: &'a str,
        dim: i64,
        buffers: &'a [TensorHandle],
        bucket_bytes: u64,
        timeout_ms: i64,
    }

    /// `dg_process_group_options`, but for its size.
    struct RawProcessGroupOptions<'a> {
        name: &'a str,
        rank: u32,
        size: u32,
        backend: &'a str,
        host: &'a str,
        timeout_ms: i64,
        join_timeout_ms: i64,
    }

    /// `dg_replica`.
    struct RawReplica<'a> {
        index: u64,
        device: &'a [u8],
        parameters: &'a [TensorHandle],
        buffers: &'a [TensorHandle],
        inputs: &'a [TensorHandle],
    }

    /// `dg_entry`.
    struct RawEntry {
        name: String,
        value: Vec<u8>,
    }

    /// `dg_safetensors_info`.
    struct RawSafetensorsInfo {
        name: String,
        dtype: i64,
        shape: Vec<i64>,
        bytes: u64,
    }

    /// `dg_checkpoint_worker_values`.
    struct RawWorkerValues {
        worker: String,
        values: Vec<RawEntry>,
    }

    /// `dg_loaded_values`.
    struct RawLoadedValues {
        step: i64,
        values: Vec<RawEntry>,
        workers: Vec<RawWorkerValues>,
    }

    /// `dg_checkpoint_contents`, but for its size; whether there are functions.
    struct RawCheckpointContents<'a> {
        tensor_names: &'a [&'a str],
        tensors: &'a [TensorHandle],
        optimizer_names: &'a [&'a str],
        optimizers: &'a [OptimizerHandle],
        saves_values: bool,
        loads_values: bool,
    }

    /// `dg_checkpoint_manager_options`, but for its size.
    struct RawCheckpointManagerOptions<'a> {
        name: &'a str,
        workers: &'a [&'a str],
        keep: u64,
        allow_dropping: bool,
    }

    /// `dg_checkpoint_load_options`, but for its size.
    #[derive(Clone, Copy, Debug)]
    struct RawLoadOptions {
        step: i64,
        timeout_ms: i64,
        not_strict: bool,
        fall_back: bool,
    }

    /// What a `dg_loaded_checkpoint` has.
    struct RawLoadedCheckpoint {
        step: i64,
        folder: String,
        missing: Vec<String>,
        unexpected: Vec<String>,
        mismatched: Vec<String>,
    }

    extern "Rust" {
        type PartFunctions;
        fn save(self: &PartFunctions, values: CheckpointValuesHandle) -> ErrorHandle;
        fn load(self: &PartFunctions, loaded: RawLoadedValues) -> ErrorHandle;
        type Handler;
        fn serve(
            self: &Handler,
            request: &RawRequest<'_>,
            reply: &mut MessageHandle,
        ) -> ErrorHandle;
        type ResponderHandler;
        fn serve(self: &ResponderHandler, request: &RawRequest<'_>, responder: ResponderHandle);
        type Forward;
        fn forward(
            self: &Forward,
            replica: &RawReplica<'_>,
            outputs: &mut [TensorHandle],
        ) -> ErrorHandle;
        type Callback;
        fn run(self: &Callback);
        type MemberCallback;
        fn tell(self: &MemberCallback, event: RawMemberEvent);
        type LogSink;
        fn write(self: &LogSink, severity: u32, text: &[u8]);
        type Owner;
        type Waiting<'a>;
        fn wait(self: &mut Waiting<'_>);
    }

    unsafe extern "C++" {
        include!("distgrad/src/ffi/shim.h");

        type ErrorHandle = super::ErrorHandle;
        type TensorHandle = super::TensorHandle;
        type ValuesHandle = super::ValuesHandle;
        type MessageHandle = super::MessageHandle;
        type FutureHandle = super::FutureHandle;
        type CancellationHandle = super::CancellationHandle;
        type ResponderHandle = super::ResponderHandle;
        type WorkerHandle = super::WorkerHandle;
        type ContextHandle = super::ContextHandle;
        type OptimizerHandle = super::OptimizerHandle;
        type DataParallelHandle = super::DataParallelHandle;
        type ProcessGroupHandle = super::ProcessGroupHandle;
        type AveragerHandle = super::AveragerHandle;
        type SafetensorsFileHandle = super::SafetensorsFileHandle;
        type CheckpointValuesHandle = super::CheckpointValuesHandle;
        type CheckpointPartHandle = super::CheckpointPartHandle;
        type CheckpointManagerHandle = super::CheckpointManagerHandle;
        #[namespace = ""]
        #[cxx_name = "dg_value"]
        type RawValue = super::RawValue;

        fn abi_version() -> u32;
        fn abi_major() -> u32;
        fn torch_version() -> &'static [u8];
        fn error_create(code: i32, message: &str, origin: u32, rank: u32) -> ErrorHandle;
        fn report_failure(code: i32, message: &str) -> Result<()>;
        fn log_set_sink(sink: Box<LogSink>) -> Result<()>;
        fn log_no_sink() -> Result<()>;

        unsafe fn tensor_from_data(
            data: *const u8,
            dtype: i32,
            shape: &[i64],
        ) -> Result<TensorHandle>;
        unsafe fn tensor_from_memory(
            data: *mut u8,
            dtype: i32,
            shape: &[i64],
            owner: Box<Owner>,
        ) -> Result<TensorHandle>;
        unsafe fn tensor_from_dlpack(managed: *mut u8) -> Result<TensorHandle>;
        fn tensor_to_dlpack(tensor: TensorHandle) -> Result<*mut u8>;
        unsafe fn tensor_from_torch(tensor: *const u8) -> Result<TensorHandle>;
        fn tensor_torch(tensor: TensorHandle) -> *mut u8;
        fn tensor_clone(tensor: TensorHandle) -> Result<TensorHandle>;
        fn tensor_detach(tensor: TensorHandle) -> Result<TensorHandle>;
        fn tensor_destroy(tensor: TensorHandle);
        fn tensor_dtype(tensor: TensorHandle) -> i32;
        /// Sizes, or strides.
        fn tensor_layout(tensor: TensorHandle, sizes: bool) -> Result<Vec<i64>>;
        fn tensor_element_count(tensor: TensorHandle) -> i64;
        fn tensor_device(tensor: TensorHandle) -> &'static [u8];
        fn tensor_data(tensor: TensorHandle) -> Result<*mut u8>;
        fn tensor_requires_grad(tensor: TensorHandle) -> bool;
        fn tensor_require_grad(tensor: TensorHandle) -> Result<()>;
        fn grad_set_enabled(enabled: bool) -> bool;
        fn grad_enabled() -> bool;
        fn set_num_threads(count: u32) -> Result<()>;
        fn num_threads() -> u32;
        fn manual_seed(seed: u64) -> Result<()>;

        fn op_check_functional(op: &str) -> Result<()>;
        fn op_tensor(op: &str, arguments: &[RawValue]) -> Result<TensorHandle>;
        fn op_call(op: &str, arguments: &[RawValue]) -> Result<ValuesHandle>;
        fn values_count(values: ValuesHandle) -> usize;
        fn values_get(values: ValuesHandle, index: usize) -> Result<RawValue>;
        fn values_destroy(values: ValuesHandle);

        fn message_create(payload: &[u8], tensors: &[TensorHandle]) -> Result<MessageHandle>;
        fn message_destroy(message: MessageHandle);
        unsafe fn message_payload<'a>(message: MessageHandle) -> &'a [u8];
        fn message_tensor_count(message: MessageHandle) -> usize;
        fn message_tensor(message: MessageHandle, index: usize) -> Result<TensorHandle>;

        fn future_wait(future: FutureHandle, timeout_ms: i64) -> Result<bool>;
        fn future_result(future: FutureHandle) -> Result<MessageHandle>;
        fn future_values(future: FutureHandle) -> Result<ValuesHandle>;
        fn future_then(future: FutureHandle, callback: Box<Callback>) -> Result<()>;
        fn future_cancel(future: FutureHandle) -> Result<()>;
        fn future_destroy(future: FutureHandle);

        fn cancellation_create() -> Result<CancellationHandle>;
        fn cancellation_cancel(cancellation: CancellationHandle) -> Result<()>;
        fn cancellation_check(cancellation: CancellationHandle) -> Result<()>;
        fn cancellation_on_cancel(
            cancellation: CancellationHandle,
            callback: Box<Callback>,
        ) -> Result<u64>;
        fn cancellation_forget(cancellation: CancellationHandle, id: u64) -> Result<()>;
        fn cancellation_destroy(cancellation: CancellationHandle);

        fn wait(waiting: &mut Waiting<'_>) -> Result<()>;

        fn worker_barrier(worker: WorkerHandle, timeout_ms: i64, flags: u64) -> Result<()>;
        fn worker_shutdown(worker: WorkerHandle, timeout_ms: i64, flags: u64) -> Result<()>;
        fn worker_serve(worker: WorkerHandle, flags: u64) -> Result<()>;
        fn worker_on_member(worker: WorkerHandle, callback: Box<MemberCallback>) -> Result<()>;
        fn worker_no_on_member(worker: WorkerHandle) -> Result<()>;
        fn worker_leave(worker: WorkerHandle, timeout_ms: i64) -> Result<()>;
        fn worker_close(worker: WorkerHandle, timeout_ms: i64) -> Result<()>;
        fn worker_destroy(worker: WorkerHandle);
        fn worker_rank(worker: WorkerHandle) -> u32;
        fn worker_world_size(worker: WorkerHandle) -> u32;
        fn worker_name(worker: WorkerHandle, rank: u32) -> String;
        fn worker_members(worker: WorkerHandle) -> Result<Vec<RawMember>>;
        fn worker_update_members(worker: WorkerHandle) -> Result<()>;
        fn worker_contexts(worker: WorkerHandle) -> Result<Vec<RawContextState>>;
        fn worker_local_rank(worker: WorkerHandle) -> u32;
        fn worker_local_world_size(worker: WorkerHandle) -> u32;
        fn worker_metrics_text(worker: WorkerHandle) -> Result<MessageHandle>;
        fn worker_trace_start(worker: WorkerHandle, max_bytes: u64) -> Result<()>;
        fn worker_trace_stop(worker: WorkerHandle) -> Result<MessageHandle>;
        fn worker_context_count(worker: WorkerHandle) -> usize;
        fn worker_register(
            worker: WorkerHandle,
            function: &str,
            handler: Box<Handler>,
        ) -> Result<()>;
        fn worker_register_responder(
            worker: WorkerHandle,
            function: &str,
            handler: Box<ResponderHandler>,
        ) -> Result<()>;
        fn responder_answer(
            responder: ResponderHandle,
            reply: MessageHandle,
            error: ErrorHandle,
        ) -> Result<()>;
        fn responder_destroy(responder: ResponderHandle);
        fn worker_call(
            worker: WorkerHandle,
            to: &str,
            function: &str,
            request: MessageHandle,
            options: &RawCallOptions,
        ) -> Result<MessageHandle>;
        fn worker_call_async(
            worker: WorkerHandle,
            to: &str,
            function: &str,
            request: MessageHandle,
            options: &RawCallOptions,
        ) -> Result<FutureHandle>;
        fn worker_call_each(
            worker: WorkerHandle,
            to: &[&str],
            function: &str,
            request: MessageHandle,
            options: &RawCallOptions,
        ) -> Result<Vec<RawReply>>;
        fn worker_call_op(
            worker: WorkerHandle,
            to: &str,
            op: &str,
            arguments: &[RawValue],
            options: &RawCallOptions,
        ) -> Result<ValuesHandle>;
        fn worker_call_op_async(
            worker: WorkerHandle,
            to: &str,
            op: &str,
            arguments: &[RawValue],
            options: &RawCallOptions,
        ) -> Result<FutureHandle>;

        fn context_create(worker: WorkerHandle) -> Result<ContextHandle>;
        fn context_release(context: ContextHandle) -> Result<()>;
        fn context_destroy(context: ContextHandle);
        fn context_id(context: ContextHandle) -> u64;
        fn context_backward(
            context: ContextHandle,
            roots: &[TensorHandle],
            root_gradients: &[TensorHandle],
            retain_graph: bool,
            timeout_ms: i64,
        ) -> Result<()>;
        fn context_backward_async(
            context: ContextHandle,
            roots: &[TensorHandle],
            root_gradients: &[TensorHandle],
            retain_graph: bool,
            timeout_ms: i64,
        ) -> Result<FutureHandle>;
        fn context_gradient(context: ContextHandle, leaf: TensorHandle) -> Result<TensorHandle>;
        fn context_set_gradient(
            context: ContextHandle,
            leaf: TensorHandle,
            gradient: TensorHandle,
        ) -> Result<()>;
        /// Leaf, gradient, leaf, gradient...
        fn context_gradients(context: ContextHandle) -> Result<Vec<TensorHandle>>;
        fn worker_sum_gradients(worker: WorkerHandle, contexts: &[ContextHandle]) -> Result<()>;

        fn optimizer_create_sgd(
            worker: WorkerHandle,
            name: &str,
            parameters: &[TensorHandle],
            numbers: [f64; 4],
            nesterov: bool,
        ) -> Result<OptimizerHandle>;
        fn optimizer_create_adam(
            worker: WorkerHandle,
            name: &str,
            parameters: &[TensorHandle],
            numbers: [f64; 5],
            amsgrad: bool,
            decoupled: bool,
        ) -> Result<OptimizerHandle>;
        fn optimizer_set_workers(optimizer: OptimizerHandle, workers: &[&str]) -> Result<()>;
        fn optimizer_step(optimizer: OptimizerHandle, context: ContextHandle) -> Result<()>;
        fn optimizer_clip_gradients(
            optimizer: OptimizerHandle,
            context: ContextHandle,
            max_norm: f64,
        ) -> Result<f64>;
        fn optimizer_set_learning_rate(
            optimizer: OptimizerHandle,
            learning_rate: f64,
        ) -> Result<()>;
        fn optimizer_state(optimizer: OptimizerHandle) -> Result<Vec<RawNamedTensor>>;
        /// As many names as tensors.
        fn optimizer_load_state(
            optimizer: OptimizerHandle,
            names: &[&str],
            tensors: &[TensorHandle],
        ) -> Result<()>;
        fn optimizer_remove(optimizer: OptimizerHandle) -> Result<()>;
        fn optimizer_destroy(optimizer: OptimizerHandle);
        fn optimizer_save(
            optimizer: OptimizerHandle,
            names: &[&str],
            parameters: &[TensorHandle],
            path: &str,
        ) -> Result<()>;
        fn optimizer_load(
            optimizer: OptimizerHandle,
            names: &[&str],
            parameters: &[TensorHandle],
            path: &str,
        ) -> Result<()>;

        /// As many names as tensors, and keys as values.
        fn safetensors_save(
            path: &str,
            names: &[&str],
            tensors: &[TensorHandle],
            keys: &[&str],
            values: &[&str],
        ) -> Result<()>;
        fn safetensors_load(path: &str) -> Result<Vec<RawNamedTensor>>;
        fn safetensors_load_into(
            path: &str,
            names: &[&str],
            tensors: &[TensorHandle],
        ) -> Result<()>;
        fn safetensors_file_open(path: &str) -> Result<SafetensorsFileHandle>;
        fn safetensors_file_tensors(file: SafetensorsFileHandle)
            -> Result<Vec<RawSafetensorsInfo>>;
        fn safetensors_file_metadata(file: SafetensorsFileHandle) -> Result<Vec<RawEntry>>;
        fn safetensors_file_read(file: SafetensorsFileHandle, name: &str) -> Result<TensorHandle>;
        fn safetensors_file_read_into(
            file: SafetensorsFileHandle,
            name: &str,
            tensor: TensorHandle,
        ) -> Result<()>;
        fn safetensors_file_destroy(file: SafetensorsFileHandle);

        fn checkpoint_values_set(
            values: CheckpointValuesHandle,
            name: &str,
            value: &[u8],
        ) -> Result<()>;
        fn checkpoint_part_create(
            worker: WorkerHandle,
            name: &str,
            contents: &RawCheckpointContents<'_>,
            functions: Box<PartFunctions>,
        ) -> Result<CheckpointPartHandle>;
        fn checkpoint_part_remove(part: CheckpointPartHandle) -> Result<()>;
        fn checkpoint_part_destroy(part: CheckpointPartHandle);
        fn checkpoint_manager_create(
            worker: WorkerHandle,
            folder: &str,
            options: &RawCheckpointManagerOptions<'_>,
        ) -> Result<CheckpointManagerHandle>;
        fn checkpoint_manager_save(
            manager: CheckpointManagerHandle,
            step: i64,
            timeout_ms: i64,
        ) -> Result<()>;
        fn checkpoint_manager_save_async(
            manager: CheckpointManagerHandle,
            step: i64,
            timeout_ms: i64,
        ) -> Result<FutureHandle>;
        fn checkpoint_manager_load(
            manager: CheckpointManagerHandle,
            options: RawLoadOptions,
        ) -> Result<RawLoadedCheckpoint>;
        fn checkpoint_manager_destroy(manager: CheckpointManagerHandle);
        fn load_checkpoint(
            worker: WorkerHandle,
            folder: &str,
            options: RawLoadOptions,
            of: &RawCheckpointManagerOptions<'_>,
        ) -> Result<RawLoadedCheckpoint>;

        fn data_parallel_create(
            parameters: &[TensorHandle],
            options: &RawDataParallelOptions<'_>,
            forward: Box<Forward>,
        ) -> Result<DataParallelHandle>;
        fn data_parallel_forward(
            data_parallel: DataParallelHandle,
            inputs: &[TensorHandle],
            output_count: usize,
        ) -> Result<Vec<TensorHandle>>;
        fn data_parallel_destroy(data_parallel: DataParallelHandle);
        /// `sizes` is empty, or as long as the devices.
        fn scatter(
            tensor: TensorHandle,
            devices: &[&str],
            dim: i64,
            sizes: &[i64],
        ) -> Result<Vec<TensorHandle>>;
        fn gather(tensors: &[TensorHandle], device: &str, dim: i64) -> Result<TensorHandle>;
        fn broadcast(tensors: &[TensorHandle], devices: &[&str]) -> Result<Vec<TensorHandle>>;
        fn reduce_add(
            tensors: &[TensorHandle],
            list_count: usize,
            device: &str,
        ) -> Result<Vec<TensorHandle>>;

        fn process_group_create(
            worker: WorkerHandle,
            options: &RawProcessGroupOptions<'_>,
        ) -> Result<ProcessGroupHandle>;
        fn process_group_destroy(group: ProcessGroupHandle);
        fn process_group_rank(group: ProcessGroupHandle) -> u32;
        fn process_group_size(group: ProcessGroupHandle) -> u32;
        fn process_group_average(group: ProcessGroupHandle, tensors: &[TensorHandle])
            -> Result<()>;
        fn process_group_broadcast(
            group: ProcessGroupHandle,
            tensors: &[TensorHandle],
            root: u32,
        ) -> Result<()>;
        fn process_group_fail(group: ProcessGroupHandle, code: i32, why: &str) -> Result<()>;
        fn averager_create(
            group: ProcessGroupHandle,
            parameters: &[TensorHandle],
            buffers: &[TensorHandle],
            bucket_bytes: u64,
            divide_by_active: bool,
        ) -> Result<AveragerHandle>;
        fn averager_destroy(averager: AveragerHandle);
        fn averager_average(averager: AveragerHandle, context: ContextHandle) -> Result<()>;
        fn averager_average_in_backward(
            averager: AveragerHandle,
            context: ContextHandle,
        ) -> Result<()>;
        fn averager_join(
            averager: AveragerHandle,
            context: ContextHandle,
            keep_gradients: bool,
        ) -> Result<bool>;
    }

    // Vec<T> of a type that is declared elsewhere has to be asked for.
    impl Vec<TensorHandle> {}
}
