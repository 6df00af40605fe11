// What Rust calls: distgrad.h's functions with C++'s strings and slices, errors being thrown.
#ifndef DISTGRAD_BINDINGS_RUST_SHIM_H_
#define DISTGRAD_BINDINGS_RUST_SHIM_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <distgrad/distgrad.hpp>
#include <exception>
#include <string>

#include "rust/cxx.h"

// cxx hands over an exception's text and nothing else, so the code is its first character, and
// origin and rank follow before the message. A code that is newer than the crate is DG_UNKNOWN.
namespace rust::behavior {
template <typename Try, typename Fail>
static void trycatch(Try&& run, Fail&& fail) noexcept {
  const auto text = [](dg_code code, uint32_t origin, uint32_t rank, const char* what) {
    const dg_code known = code >= DG_OK && code <= DG_UNAUTHENTICATED ? code : DG_UNKNOWN;
    return std::string(1, static_cast<char>('@' + known)) + std::to_string(origin) + ' ' +
           std::to_string(rank) + ' ' + what;
  };
  try {
    run();
  } catch (const dg::Error& error) {
    fail(text(error.code(), error.origin(), error.rank(), error.what()));
  } catch (const std::exception& error) {
    fail(text(DG_INTERNAL, DG_ORIGIN_NONE, 0, error.what()));
  }
}
}  // namespace rust::behavior

namespace distgrad_rust {

using ErrorHandle = dg_error*;
using TensorHandle = dg_tensor*;
using ValuesHandle = dg_values*;
using MessageHandle = dg_message*;
using FutureHandle = dg_future*;
using CancellationHandle = dg_cancellation*;
using ResponderHandle = dg_responder*;
using WorkerHandle = dg_worker*;
using ContextHandle = dg_context*;
using OptimizerHandle = dg_optimizer*;
using DataParallelHandle = dg_data_parallel*;
using ProcessGroupHandle = dg_process_group*;
using AveragerHandle = dg_gradient_averager*;
using SafetensorsFileHandle = dg_safetensors_file*;
using CheckpointValuesHandle = dg_checkpoint_values*;
using CheckpointPartHandle = dg_checkpoint_part*;
using CheckpointManagerHandle = dg_checkpoint_manager*;

struct Handler;
struct ResponderHandler;
struct Forward;
struct PartFunctions;
struct Callback;
struct MemberCallback;
struct LogSink;
struct Owner;
struct Waiting;
struct RawWorkerOptions;
struct RawMember;
struct RawContextState;
struct RawCallOptions;
struct RawReply;
struct RawNamedTensor;
struct RawDataParallelOptions;
struct RawProcessGroupOptions;
struct RawEntry;
struct RawSafetensorsInfo;
struct RawCheckpointContents;
struct RawCheckpointManagerOptions;
struct RawLoadOptions;
struct RawLoadedCheckpoint;

static_assert(DG_ABI_MAJOR == 1, "this crate is made for version 1 of distgrad's C interface");

// What Rust takes a dg_value to be.
static_assert(sizeof(dg_value) == 24 && offsetof(dg_value, as) == 8);
static_assert(sizeof(dg_str) == 16 && offsetof(dg_str, size) == 8);
static_assert(DG_VALUE_INTEGER == 1 && DG_VALUE_COMPLEX == 4 && DG_VALUE_TENSORS == 10);

using Bytes = rust::Slice<const uint8_t>;
using Numbers = rust::Slice<const int64_t>;
using Tensors = rust::Slice<const TensorHandle>;
using Values = rust::Slice<const dg_value>;
using Texts = rust::Slice<const rust::Str>;

// Bytes and not rust::Str, for what comes from elsewhere need not be UTF-8.
inline Bytes ToBytes(dg_str text) {
  return {reinterpret_cast<const uint8_t*>(text.data), text.size};
}
inline dg_str ToStr(rust::Str text) { return {text.data(), text.size()}; }
inline dg_str ToStr(const rust::String& text) { return {text.data(), text.size()}; }

// What `function` stores in its last argument.
template <typename T, typename Function, typename... Arguments>
T Out(Function function, Arguments... arguments) {
  T out{};
  dg::Check(function(arguments..., &out));
  return out;
}

// ----------------------------------------------------------------------------- Version, errors

inline uint32_t abi_version() { return dg_abi_version(); }
inline uint32_t abi_major() { return DG_ABI_MAJOR; }
inline Bytes torch_version() { return ToBytes(dg_torch_version()); }
inline ErrorHandle error_create(int32_t code, rust::Str message, uint32_t origin, uint32_t rank) {
  return dg_error_create_with_origin(code, ToStr(message), origin, rank);
}
inline void report_failure(int32_t code, rust::Str message) {
  dg::Check(dg_report_failure(code, ToStr(message)));
}

void log_set_sink(rust::Box<LogSink> sink);
inline void log_no_sink() { dg::Check(dg_log_set_sink(nullptr, nullptr, nullptr)); }

// ------------------------------------------------------------------------------------ Tensors

inline TensorHandle tensor_from_data(const uint8_t* data, int32_t dtype, Numbers shape) {
  return Out<TensorHandle>(dg_tensor_from_data, data, dtype, shape.data(), shape.size());
}
TensorHandle tensor_from_memory(uint8_t* data, int32_t dtype, Numbers shape,
                                rust::Box<Owner> owner);
inline TensorHandle tensor_from_dlpack(uint8_t* managed) {
  return Out<TensorHandle>(dg_tensor_from_dlpack,
                           reinterpret_cast<DLManagedTensorVersioned*>(managed));
}
inline uint8_t* tensor_to_dlpack(TensorHandle tensor) {
  return reinterpret_cast<uint8_t*>(Out<DLManagedTensorVersioned*>(dg_tensor_to_dlpack, tensor));
}
inline TensorHandle tensor_from_torch(const uint8_t* tensor) {
  return Out<TensorHandle>(dg_tensor_from_torch, tensor);
}
inline uint8_t* tensor_torch(TensorHandle tensor) {
  return static_cast<uint8_t*>(dg_tensor_torch(tensor));
}
inline TensorHandle tensor_clone(TensorHandle tensor) {
  return Out<TensorHandle>(dg_tensor_clone, tensor);
}
inline TensorHandle tensor_detach(TensorHandle tensor) {
  return Out<TensorHandle>(dg_tensor_detach, tensor);
}
inline void tensor_destroy(TensorHandle tensor) { dg_tensor_destroy(tensor); }
inline int32_t tensor_dtype(TensorHandle tensor) { return dg_tensor_dtype(tensor); }
rust::Vec<int64_t> tensor_layout(TensorHandle tensor, bool sizes);
inline int64_t tensor_element_count(TensorHandle tensor) { return dg_tensor_element_count(tensor); }
inline Bytes tensor_device(TensorHandle tensor) { return ToBytes(dg_tensor_device(tensor)); }
inline uint8_t* tensor_data(TensorHandle tensor) {
  return static_cast<uint8_t*>(Out<void*>(dg_tensor_data, tensor));
}
inline bool tensor_requires_grad(TensorHandle tensor) { return dg_tensor_requires_grad(tensor); }
inline void tensor_require_grad(TensorHandle tensor) { dg::Check(dg_tensor_require_grad(tensor)); }
inline bool grad_set_enabled(bool enabled) { return dg_grad_set_enabled(enabled); }
inline bool grad_enabled() { return dg_grad_enabled(); }
inline void set_num_threads(uint32_t count) { dg::Check(dg_set_num_threads(count)); }
inline uint32_t num_threads() { return dg_num_threads(); }
inline void manual_seed(uint64_t seed) { dg::Check(dg_manual_seed(seed)); }

// ---------------------------------------------------------------------- Operators and messages

inline void op_check_functional(rust::Str op) { dg::Check(dg_op_check_functional(ToStr(op))); }
TensorHandle op_tensor(rust::Str op, Values arguments);
inline ValuesHandle op_call(rust::Str op, Values arguments) {
  return Out<ValuesHandle>(dg_op_call, ToStr(op), arguments.data(), arguments.size());
}
inline size_t values_count(ValuesHandle values) { return dg_values_count(values); }
inline dg_value values_get(ValuesHandle values, size_t index) {
  return Out<dg_value>(dg_values_get, values, index);
}
inline void values_destroy(ValuesHandle values) { dg_values_destroy(values); }

inline MessageHandle message_create(Bytes payload, Tensors tensors) {
  return Out<MessageHandle>(dg_message_create, payload.data(), payload.size(), tensors.data(),
                            tensors.size());
}
inline void message_destroy(MessageHandle message) { dg_message_destroy(message); }
inline Bytes message_payload(MessageHandle message) { return ToBytes(dg_message_payload(message)); }
inline size_t message_tensor_count(MessageHandle message) {
  return dg_message_tensor_count(message);
}
inline TensorHandle message_tensor(MessageHandle message, size_t index) {
  return Out<TensorHandle>(dg_message_tensor, message, index);
}

// ------------------------------------------------------------------------------------ Futures

inline bool future_wait(FutureHandle future, int64_t timeout_ms) {
  return Out<bool>(dg_future_wait, future, timeout_ms);
}
inline MessageHandle future_result(FutureHandle future) {
  return Out<MessageHandle>(dg_future_result, future);
}
inline ValuesHandle future_values(FutureHandle future) {
  return Out<ValuesHandle>(dg_future_values, future);
}
void future_then(FutureHandle future, rust::Box<Callback> callback);
inline void future_cancel(FutureHandle future) { dg::Check(dg_future_cancel(future)); }
inline void future_destroy(FutureHandle future) { dg_future_destroy(future); }

inline CancellationHandle cancellation_create() {
  return Out<CancellationHandle>(dg_cancellation_create);
}
inline void cancellation_cancel(CancellationHandle cancellation) {
  dg::Check(dg_cancellation_cancel(cancellation));
}
inline void cancellation_check(CancellationHandle cancellation) {
  dg::Check(dg_cancellation_check(cancellation));
}
uint64_t cancellation_on_cancel(CancellationHandle cancellation, rust::Box<Callback> callback);
inline void cancellation_forget(CancellationHandle cancellation, uint64_t id) {
  dg::Check(dg_cancellation_forget(cancellation, id));
}
inline void cancellation_destroy(CancellationHandle cancellation) {
  dg_cancellation_destroy(cancellation);
}

// ------------------------------------------------------------------------------------ Workers

void wait(Waiting& waiting);
WorkerHandle worker_create(const RawWorkerOptions& options);
inline void worker_barrier(WorkerHandle worker, int64_t timeout_ms, uint64_t flags) {
  dg::Check(dg_worker_barrier(worker, timeout_ms, flags));
}
inline void worker_shutdown(WorkerHandle worker, int64_t timeout_ms, uint64_t flags) {
  dg::Check(dg_worker_shutdown(worker, timeout_ms, flags));
}
inline void worker_serve(WorkerHandle worker, uint64_t flags) {
  dg::Check(dg_worker_serve(worker, flags));
}
void worker_on_member(WorkerHandle worker, rust::Box<MemberCallback> callback);
inline void worker_no_on_member(WorkerHandle worker) {
  dg::Check(dg_worker_on_member(worker, nullptr, nullptr, nullptr));
}
inline void worker_leave(WorkerHandle worker, int64_t timeout_ms) {
  dg::Check(dg_worker_leave(worker, timeout_ms));
}
inline void worker_close(WorkerHandle worker, int64_t timeout_ms) {
  dg::Check(dg_worker_close(worker, timeout_ms));
}
inline void worker_destroy(WorkerHandle worker) { dg_worker_destroy(worker); }
inline uint32_t worker_rank(WorkerHandle worker) { return dg_worker_rank(worker); }
inline uint32_t worker_world_size(WorkerHandle worker) { return dg_worker_world_size(worker); }
inline rust::String worker_name(WorkerHandle worker, uint32_t rank) {
  const dg_str name = dg_worker_name(worker, rank);
  return rust::String::lossy(name.data, name.size);
}
rust::Vec<RawMember> worker_members(WorkerHandle worker);
inline void worker_update_members(WorkerHandle worker) {
  dg::Check(dg_worker_update_members(worker));
}
rust::Vec<RawContextState> worker_contexts(WorkerHandle worker);
inline uint32_t worker_local_rank(WorkerHandle worker) { return dg_worker_local_rank(worker); }
inline uint32_t worker_local_world_size(WorkerHandle worker) {
  return dg_worker_local_world_size(worker);
}
inline MessageHandle worker_metrics_text(WorkerHandle worker) {
  return Out<MessageHandle>(dg_worker_metrics_text, worker);
}
inline void worker_trace_start(WorkerHandle worker, uint64_t max_bytes) {
  dg_trace_options options = DG_TRACE_OPTIONS_INIT;
  options.max_bytes = max_bytes;
  dg::Check(dg_worker_start_trace(worker, &options));
}
inline MessageHandle worker_trace_stop(WorkerHandle worker) {
  return Out<MessageHandle>(dg_worker_stop_trace, worker);
}
inline size_t worker_context_count(WorkerHandle worker) { return dg_worker_context_count(worker); }
void worker_register(WorkerHandle worker, rust::Str function, rust::Box<Handler> handler);

void worker_register_responder(WorkerHandle worker, rust::Str function,
                               rust::Box<ResponderHandler> handler);
inline void responder_answer(ResponderHandle responder, MessageHandle reply, ErrorHandle error) {
  dg::Check(dg_responder_answer(responder, reply, error));
}
inline void responder_destroy(ResponderHandle responder) { dg_responder_destroy(responder); }

MessageHandle worker_call(WorkerHandle worker, rust::Str to, rust::Str function,
                          MessageHandle request, const RawCallOptions& options);
FutureHandle worker_call_async(WorkerHandle worker, rust::Str to, rust::Str function,
                               MessageHandle request, const RawCallOptions& options);
rust::Vec<RawReply> worker_call_each(WorkerHandle worker, Texts to, rust::Str function,
                                     MessageHandle request, const RawCallOptions& options);
ValuesHandle worker_call_op(WorkerHandle worker, rust::Str to, rust::Str op, Values arguments,
                            const RawCallOptions& options);
FutureHandle worker_call_op_async(WorkerHandle worker, rust::Str to, rust::Str op, Values arguments,
                                  const RawCallOptions& options);

// --------------------------------------------------------------------- Autograd and optimizers

inline ContextHandle context_create(WorkerHandle worker) {
  return Out<ContextHandle>(dg_context_create, worker);
}
inline void context_release(ContextHandle context) { dg::Check(dg_context_release(context)); }
inline void context_destroy(ContextHandle context) { dg_context_destroy(context); }
inline uint64_t context_id(ContextHandle context) { return dg_context_id(context); }

// `gradients` is empty, or as long as the roots.
inline dg_backward_options BackwardOptions(Tensors gradients, bool retain, int64_t timeout_ms) {
  dg_backward_options options = DG_BACKWARD_OPTIONS_INIT;
  options.flags = retain ? DG_BACKWARD_RETAIN_GRAPH : 0;
  options.timeout_ms = timeout_ms;
  options.root_gradients = gradients.empty() ? nullptr : gradients.data();
  return options;
}
inline void context_backward(ContextHandle context, Tensors roots, Tensors root_gradients,
                             bool retain_graph, int64_t timeout_ms) {
  const dg_backward_options options = BackwardOptions(root_gradients, retain_graph, timeout_ms);
  dg::Check(dg_context_backward(context, roots.data(), roots.size(), &options));
}
inline FutureHandle context_backward_async(ContextHandle context, Tensors roots,
                                           Tensors root_gradients, bool retain_graph,
                                           int64_t timeout_ms) {
  const dg_backward_options options = BackwardOptions(root_gradients, retain_graph, timeout_ms);
  return Out<FutureHandle>(dg_context_backward_async, context, roots.data(), roots.size(),
                           &options);
}
inline TensorHandle context_gradient(ContextHandle context, TensorHandle leaf) {
  return Out<TensorHandle>(dg_context_gradient, context, leaf);
}
inline void context_set_gradient(ContextHandle context, TensorHandle leaf, TensorHandle gradient) {
  dg::Check(dg_context_set_gradient(context, leaf, gradient));
}
rust::Vec<TensorHandle> context_gradients(ContextHandle context);
inline void worker_sum_gradients(WorkerHandle worker, rust::Slice<const ContextHandle> contexts) {
  dg::Check(dg_worker_sum_gradients(worker, contexts.data(), contexts.size()));
}

// `numbers`: learning rate, momentum, dampening, weight decay.
OptimizerHandle optimizer_create_sgd(WorkerHandle worker, rust::Str name, Tensors parameters,
                                     std::array<double, 4> numbers, bool nesterov);
// `numbers`: learning rate, beta1, beta2, epsilon, weight decay.
OptimizerHandle optimizer_create_adam(WorkerHandle worker, rust::Str name, Tensors parameters,
                                      std::array<double, 5> numbers, bool amsgrad, bool decoupled);
void optimizer_set_workers(OptimizerHandle optimizer, Texts workers);
inline void optimizer_step(OptimizerHandle optimizer, ContextHandle context) {
  dg::Check(dg_optimizer_step(optimizer, context));
}
inline double optimizer_clip_gradients(OptimizerHandle optimizer, ContextHandle context,
                                       double max_norm) {
  return Out<double>(dg_optimizer_clip_gradients, optimizer, context, max_norm);
}
inline void optimizer_set_learning_rate(OptimizerHandle optimizer, double learning_rate) {
  dg::Check(dg_optimizer_set_learning_rate(optimizer, learning_rate));
}
rust::Vec<RawNamedTensor> optimizer_state(OptimizerHandle optimizer);
void optimizer_load_state(OptimizerHandle optimizer, Texts names, Tensors tensors);
inline void optimizer_remove(OptimizerHandle optimizer) {
  dg::Check(dg_optimizer_remove(optimizer));
}
inline void optimizer_destroy(OptimizerHandle optimizer) { dg_optimizer_destroy(optimizer); }

void optimizer_save(OptimizerHandle optimizer, Texts names, Tensors parameters, rust::Str path);
void optimizer_load(OptimizerHandle optimizer, Texts names, Tensors parameters, rust::Str path);

// ------------------------------------------------------------------- Files of tensors, checkpoints

void safetensors_save(rust::Str path, Texts names, Tensors tensors, Texts keys, Texts values);
rust::Vec<RawNamedTensor> safetensors_load(rust::Str path);
void safetensors_load_into(rust::Str path, Texts names, Tensors tensors);
inline SafetensorsFileHandle safetensors_file_open(rust::Str path) {
  return Out<SafetensorsFileHandle>(dg_safetensors_file_open, ToStr(path));
}
rust::Vec<RawSafetensorsInfo> safetensors_file_tensors(SafetensorsFileHandle file);
rust::Vec<RawEntry> safetensors_file_metadata(SafetensorsFileHandle file);
inline TensorHandle safetensors_file_read(SafetensorsFileHandle file, rust::Str name) {
  return Out<TensorHandle>(dg_safetensors_file_read, file, ToStr(name));
}
inline void safetensors_file_read_into(SafetensorsFileHandle file, rust::Str name,
                                       TensorHandle tensor) {
  dg::Check(dg_safetensors_file_read_into(file, ToStr(name), tensor));
}
inline void safetensors_file_destroy(SafetensorsFileHandle file) {
  dg_safetensors_file_destroy(file);
}

inline void checkpoint_values_set(CheckpointValuesHandle values, rust::Str name, Bytes value) {
  dg::Check(dg_checkpoint_values_set(values, ToStr(name),
                                     {reinterpret_cast<const char*>(value.data()), value.size()}));
}
CheckpointPartHandle checkpoint_part_create(WorkerHandle worker, rust::Str name,
                                            const RawCheckpointContents& contents,
                                            rust::Box<PartFunctions> functions);
inline void checkpoint_part_remove(CheckpointPartHandle part) {
  dg::Check(dg_checkpoint_part_remove(part));
}
inline void checkpoint_part_destroy(CheckpointPartHandle part) { dg_checkpoint_part_destroy(part); }
CheckpointManagerHandle checkpoint_manager_create(WorkerHandle worker, rust::Str folder,
                                                  const RawCheckpointManagerOptions& options);
inline void checkpoint_manager_save(CheckpointManagerHandle manager, int64_t step,
                                    int64_t timeout_ms) {
  dg::Check(dg_checkpoint_manager_save(manager, step, timeout_ms));
}
inline FutureHandle checkpoint_manager_save_async(CheckpointManagerHandle manager, int64_t step,
                                                  int64_t timeout_ms) {
  return Out<FutureHandle>(dg_checkpoint_manager_save_async, manager, step, timeout_ms);
}
RawLoadedCheckpoint checkpoint_manager_load(CheckpointManagerHandle manager,
                                            RawLoadOptions options);
inline void checkpoint_manager_destroy(CheckpointManagerHandle manager) {
  dg_checkpoint_manager_destroy(manager);
}
RawLoadedCheckpoint load_checkpoint(WorkerHandle worker, rust::Str folder, RawLoadOptions options,
                                    const RawCheckpointManagerOptions& of);

// ------------------------------------------------------------------------------ Data parallel

DataParallelHandle data_parallel_create(Tensors parameters, const RawDataParallelOptions& options,
                                        rust::Box<Forward> forward);
rust::Vec<TensorHandle> data_parallel_forward(DataParallelHandle data_parallel, Tensors inputs,
                                              size_t output_count);
inline void data_parallel_destroy(DataParallelHandle data_parallel) {
  dg_data_parallel_destroy(data_parallel);
}
rust::Vec<TensorHandle> scatter(TensorHandle tensor, Texts devices, int64_t dim, Numbers sizes);
inline TensorHandle gather(Tensors tensors, rust::Str device, int64_t dim) {
  return Out<TensorHandle>(dg_gather, tensors.data(), tensors.size(), ToStr(device), dim);
}
rust::Vec<TensorHandle> broadcast(Tensors tensors, Texts devices);
rust::Vec<TensorHandle> reduce_add(Tensors tensors, size_t list_count, rust::Str device);

// ----------------------------------------------------------------------------- Process groups

ProcessGroupHandle process_group_create(WorkerHandle worker, const RawProcessGroupOptions& options);
inline void process_group_destroy(ProcessGroupHandle group) { dg_process_group_destroy(group); }
inline uint32_t process_group_rank(ProcessGroupHandle group) {
  return dg_process_group_rank(group);
}
inline uint32_t process_group_size(ProcessGroupHandle group) {
  return dg_process_group_size(group);
}
inline void process_group_average(ProcessGroupHandle group, Tensors tensors) {
  dg::Check(dg_process_group_average(group, tensors.data(), tensors.size()));
}
inline void process_group_broadcast(ProcessGroupHandle group, Tensors tensors, uint32_t root) {
  dg::Check(dg_process_group_broadcast(group, tensors.data(), tensors.size(), root));
}
inline void process_group_fail(ProcessGroupHandle group, int32_t code, rust::Str why) {
  dg::Check(dg_process_group_fail(group, code, ToStr(why)));
}
AveragerHandle averager_create(ProcessGroupHandle group, Tensors parameters, Tensors buffers,
                               uint64_t bucket_bytes, bool divide_by_active);
inline void averager_destroy(AveragerHandle averager) { dg_gradient_averager_destroy(averager); }
inline void averager_average(AveragerHandle averager, ContextHandle context) {
  dg::Check(dg_gradient_averager_average(averager, context));
}
inline void averager_average_in_backward(AveragerHandle averager, ContextHandle context) {
  dg::Check(dg_gradient_averager_average_in_backward(averager, context));
}
inline bool averager_join(AveragerHandle averager, ContextHandle context, bool keep_gradients) {
  bool others_go_on = false;
  dg::Check(dg_gradient_averager_join(averager, context,
                                      keep_gradients ? DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS : 0,
                                      &others_go_on));
  return others_go_on;
}

}  // namespace distgrad_rust

#endif  // DISTGRAD_BINDINGS_RUST_SHIM_H_
