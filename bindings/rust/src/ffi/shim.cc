// Turns what Rust passes into arguments of distgrad.h, and calls Rust's closures from its
// callbacks.
#include "distgrad/src/ffi/shim.h"

#include <utility>
#include <vector>

#include "distgrad/src/ffi/bridge.rs.h"

namespace distgrad_rust {
namespace {

// User data that is a Rust box.
template <typename T>
void* Leak(rust::Box<T> box) {
  return std::move(box).into_raw();
}
template <typename T>
void End(void* user_data) {
  rust::Box<T>::from_raw(static_cast<T*>(user_data));
}

// A handler knows its worker: the one that its closure was registered on.
template <typename H>
struct Registration {
  WorkerHandle worker;
  rust::Box<H> handler;

  static void End(void* user_data) { delete static_cast<Registration*>(user_data); }
};

// Handles are numbers: borrowed ones are not written through on the other side.
RawRequest ToRequest(WorkerHandle worker, const dg_request* request) {
  return {worker,
          ToBytes(request->function),
          request->from,
          const_cast<dg_message*>(request->message),
          const_cast<dg_context*>(request->context),
          request->timeout_ms,
          const_cast<dg_cancellation*>(request->cancellation)};
}

dg_error* Serve(void* user_data, const dg_request* request, dg_message** reply) noexcept {
  const auto* registration = static_cast<const Registration<Handler>*>(user_data);
  return registration->handler->serve(ToRequest(registration->worker, request), *reply);
}

void Respond(void* user_data, const dg_request* request, dg_responder* responder) noexcept {
  const auto* registration = static_cast<const Registration<ResponderHandler>*>(user_data);
  registration->handler->serve(ToRequest(registration->worker, request), responder);
}

void Run(void* callback) { static_cast<const Callback*>(callback)->run(); }

Tensors ToTensors(const dg_tensor* const* tensors, size_t count) {
  return {const_cast<dg_tensor* const*>(tensors), count};
}

dg_error* RunForward(void* user_data, const dg_replica* replica, dg_tensor** outputs) noexcept {
  const RawReplica raw{replica->index, ToBytes(replica->device),
                       ToTensors(replica->parameters, replica->parameter_count),
                       ToTensors(replica->buffers, replica->buffer_count),
                       ToTensors(replica->inputs, replica->input_count)};
  return static_cast<const Forward*>(user_data)->forward(raw, {outputs, replica->output_count});
}

dg_call_options ToOptions(const RawCallOptions& from) {
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  options.context = from.context;
  options.timeout_ms = from.timeout_ms;
  options.cancellation = from.cancellation;
  return options;
}

std::vector<dg_str> ToStrs(Texts texts) {
  std::vector<dg_str> strs;
  for (rust::Str text : texts) strs.push_back(ToStr(text));
  return strs;
}

template <typename T>
rust::Vec<T> ToVec(const T* data, size_t size) {
  rust::Vec<T> copy;
  copy.reserve(size);
  for (size_t i = 0; i < size; ++i) copy.push_back(data[i]);
  return copy;
}
rust::Vec<TensorHandle> ToVec(const std::vector<dg_tensor*>& handles) {
  return ToVec(handles.data(), handles.size());
}

// The tensors that `load` visits, each with its name.
template <typename Load>
rust::Vec<RawNamedTensor> NamedTensors(const Load& load) {
  struct Visit {
    rust::Vec<RawNamedTensor> tensors;
    dg_error* error = nullptr;  // the first
  } visit;
  const auto add = [](void* data, dg_str name, const dg_tensor* tensor) {
    auto& visit = *static_cast<Visit*>(data);
    dg_tensor* clone = nullptr;
    if (visit.error == nullptr) visit.error = dg_tensor_clone(tensor, &clone);
    if (clone != nullptr) {
      visit.tensors.push_back({rust::String::lossy(name.data, name.size), clone});
    }
  };
  dg_error* error = load(add, &visit);
  if (error == nullptr) std::swap(error, visit.error);
  if (error != nullptr) {
    for (const RawNamedTensor& each : visit.tensors) dg_tensor_destroy(each.tensor);
    dg_error_destroy(visit.error);
  }
  dg::Check(error);
  return std::move(visit.tensors);
}

rust::String ToString(dg_str text) { return rust::String::lossy(text.data, text.size); }

RawEntry ToEntry(const dg_entry& entry) {
  return {ToString(entry.name),
          ToVec(reinterpret_cast<const uint8_t*>(entry.value.data), entry.value.size)};
}
rust::Vec<RawEntry> ToEntries(const dg_entry* entries, size_t count) {
  rust::Vec<RawEntry> copy;
  for (size_t i = 0; i < count; ++i) copy.push_back(ToEntry(entries[i]));
  return copy;
}

dg_error* SaveValues(void* user_data, dg_checkpoint_values* values) noexcept {
  return static_cast<const PartFunctions*>(user_data)->save(values);
}

dg_error* LoadValues(void* user_data, const dg_loaded_values* loaded) noexcept {
  RawLoadedValues raw{loaded->step, ToEntries(loaded->values, loaded->value_count), {}};
  for (size_t i = 0; i < loaded->worker_count; ++i) {
    const dg_checkpoint_worker_values& worker = *loaded->workers[i];
    raw.workers.push_back({ToString(worker.worker), ToEntries(worker.values, worker.value_count)});
  }
  return static_cast<const PartFunctions*>(user_data)->load(std::move(raw));
}

// With what it borrows.
struct ManagerOptions {
  explicit ManagerOptions(const RawCheckpointManagerOptions& from) : workers(ToStrs(from.workers)) {
    options.name = ToStr(from.name);
    options.workers = workers.data();
    options.worker_count = workers.size();
    options.keep = from.keep;
    options.flags = from.allow_dropping ? DG_CHECKPOINT_ALLOW_DROPPING : 0;
  }
  const std::vector<dg_str> workers;
  dg_checkpoint_manager_options options = DG_CHECKPOINT_MANAGER_OPTIONS_INIT;
};

dg_checkpoint_load_options ToOptions(const RawLoadOptions& from) {
  dg_checkpoint_load_options options = DG_CHECKPOINT_LOAD_OPTIONS_INIT;
  options.step = from.step;
  options.timeout_ms = from.timeout_ms;
  options.flags = (from.not_strict ? DG_CHECKPOINT_LOAD_NOT_STRICT : 0) |
                  (from.fall_back ? DG_CHECKPOINT_LOAD_FALL_BACK : 0);
  return options;
}

// Takes `loaded`.
RawLoadedCheckpoint ToLoaded(dg_loaded_checkpoint* loaded) {
  const dg::LoadedCheckpoint from(loaded);
  const auto list = [](const std::vector<std::string>& items) {
    rust::Vec<rust::String> copy;
    for (const std::string& item : items) copy.push_back(rust::String::lossy(item));
    return copy;
  };
  return {from.step, rust::String::lossy(from.folder), list(from.missing), list(from.unexpected),
          list(from.mismatched)};
}

}  // namespace

TensorHandle tensor_from_memory(uint8_t* data, int32_t dtype, Numbers shape,
                                rust::Box<Owner> owner) {
  dg_tensor* out = nullptr;
  dg::Check(dg_tensor_from_memory(data, dtype, shape.data(), nullptr, shape.size(),
                                  Leak(std::move(owner)), End<Owner>, &out));
  return out;
}

rust::Vec<int64_t> tensor_layout(TensorHandle tensor, bool sizes) {
  // Without a handle of its own, for which there may be no place.
  const std::vector<int64_t> numbers = dg::internal::Layout(tensor, sizes);
  return ToVec(numbers.data(), numbers.size());
}

void log_set_sink(rust::Box<LogSink> sink) {
  const auto write = [](void* data, uint32_t severity, dg_str text) {
    static_cast<const LogSink*>(data)->write(severity, ToBytes(text));
  };
  dg::Check(dg_log_set_sink(write, Leak(std::move(sink)), End<LogSink>));
}

TensorHandle op_tensor(rust::Str op, Values arguments) {
  dg_tensor* out = nullptr;
  dg::Check(dg_op_tensors(ToStr(op), arguments.data(), arguments.size(), &out, 1));
  return out;
}

void future_then(FutureHandle future, rust::Box<Callback> callback) {
  dg::Check(dg_future_then(future, Run, Leak(std::move(callback)), End<Callback>));
}

uint64_t cancellation_on_cancel(CancellationHandle cancellation, rust::Box<Callback> callback) {
  return Out<uint64_t>(dg_cancellation_on_cancel, cancellation, Run, Leak(std::move(callback)),
                       End<Callback>);
}

void wait(Waiting& waiting) {
  dg::Check(dg_wait([](void* data) { static_cast<Waiting*>(data)->wait(); }, &waiting));
}

rust::Vec<RawMember> worker_members(WorkerHandle worker) {
  rust::Vec<RawMember> members;
  const auto add = [](void* data, const dg_member* member) {
    static_cast<rust::Vec<RawMember>*>(data)->push_back(
        {rust::String::lossy(member->name.data, member->name.size), member->rank,
         member->incarnation});
  };
  dg::Check(dg_worker_members(worker, add, &members));
  return members;
}

void worker_on_member(WorkerHandle worker, rust::Box<MemberCallback> callback) {
  const auto tell = [](void* data, const dg_member_event* event) {
    static_cast<const MemberCallback*>(data)->tell(
        {event->kind, rust::String::lossy(event->name.data, event->name.size), event->rank,
         event->incarnation, rust::String::lossy(event->reason.data, event->reason.size)});
  };
  dg::Check(dg_worker_on_member(worker, tell, Leak(std::move(callback)), End<MemberCallback>));
}

rust::Vec<RawContextState> worker_contexts(WorkerHandle worker) {
  rust::Vec<RawContextState> contexts;
  const auto add = [](void* data, const dg_context_state* context) {
    rust::Vec<RawPassState> passes;
    for (size_t i = 0; i < context->pass_count; ++i) {
      const dg_pass_state* pass = context->passes[i];
      passes.push_back({pass->id, pass->flags, pass->busy,
                        ToVec(pass->awaited, pass->awaited_count),
                        ToVec(pass->unacknowledged, pass->unacknowledged_count)});
    }
    static_cast<rust::Vec<RawContextState>*>(data)->push_back(
        {context->id, context->sends, context->receives, context->gradients,
         ToVec(context->peers, context->peer_count), std::move(passes)});
  };
  dg::Check(dg_worker_contexts(worker, add, &contexts));
  return contexts;
}

void worker_register(WorkerHandle worker, rust::Str function, rust::Box<Handler> handler) {
  using Ours = Registration<Handler>;
  dg::Check(dg_worker_register(worker, ToStr(function), Serve, new Ours{worker, std::move(handler)},
                               Ours::End));
}

void worker_register_responder(WorkerHandle worker, rust::Str function,
                               rust::Box<ResponderHandler> handler) {
  using Ours = Registration<ResponderHandler>;
  dg::Check(dg_worker_register_responder(worker, ToStr(function), Respond,
                                         new Ours{worker, std::move(handler)}, Ours::End));
}

MessageHandle worker_call(WorkerHandle worker, rust::Str to, rust::Str function,
                          MessageHandle request, const RawCallOptions& from) {
  const dg_call_options options = ToOptions(from);
  return Out<MessageHandle>(dg_worker_call, worker, ToStr(to), ToStr(function), request, &options);
}

FutureHandle worker_call_async(WorkerHandle worker, rust::Str to, rust::Str function,
                               MessageHandle request, const RawCallOptions& from) {
  const dg_call_options options = ToOptions(from);
  return Out<FutureHandle>(dg_worker_call_async, worker, ToStr(to), ToStr(function), request,
                           &options);
}

rust::Vec<RawReply> worker_call_each(WorkerHandle worker, Texts to, rust::Str function,
                                     MessageHandle request, const RawCallOptions& from) {
  const dg_call_options options = ToOptions(from);
  const std::vector<dg_str> names = ToStrs(to);
  std::vector<dg_message*> replies(names.size());
  std::vector<dg_error*> errors(names.size());
  dg::Check(dg_worker_call_each(worker, names.data(), names.size(), ToStr(function), request,
                                &options, replies.data(), errors.data()));
  rust::Vec<RawReply> results;
  for (size_t i = 0; i < names.size(); ++i) {
    const dg_str text = dg_error_message(errors[i]);
    uint32_t rank = 0;
    const uint32_t origin = dg_error_origin(errors[i], &rank);
    results.push_back({replies[i], dg_error_code(errors[i]),
                       rust::String::lossy(text.data, text.size), origin, rank});
    dg_error_destroy(errors[i]);
  }
  return results;
}

ValuesHandle worker_call_op(WorkerHandle worker, rust::Str to, rust::Str op, Values arguments,
                            const RawCallOptions& from) {
  const dg_call_options options = ToOptions(from);
  return Out<ValuesHandle>(dg_worker_call_op, worker, ToStr(to), ToStr(op), arguments.data(),
                           arguments.size(), &options);
}

FutureHandle worker_call_op_async(WorkerHandle worker, rust::Str to, rust::Str op, Values arguments,
                                  const RawCallOptions& from) {
  const dg_call_options options = ToOptions(from);
  return Out<FutureHandle>(dg_worker_call_op_async, worker, ToStr(to), ToStr(op), arguments.data(),
                           arguments.size(), &options);
}

rust::Vec<TensorHandle> context_gradients(ContextHandle context) {
  struct Visit {
    rust::Vec<TensorHandle> handles;
    dg_error* error = nullptr;  // the first
  } visit;
  const auto add = [](void* data, const dg_tensor* leaf, const dg_tensor* gradient) {
    auto& visit = *static_cast<Visit*>(data);
    for (const dg_tensor* tensor : {leaf, gradient}) {
      dg_tensor* clone = nullptr;
      if (visit.error == nullptr) visit.error = dg_tensor_clone(tensor, &clone);
      if (clone != nullptr) visit.handles.push_back(clone);
    }
  };
  dg_error* error = dg_context_gradients(context, add, &visit);
  if (error == nullptr) std::swap(error, visit.error);
  if (error != nullptr) {
    for (TensorHandle handle : visit.handles) dg_tensor_destroy(handle);
    dg_error_destroy(visit.error);
  }
  dg::Check(error);
  return std::move(visit.handles);
}

OptimizerHandle optimizer_create_sgd(WorkerHandle worker, rust::Str name, Tensors parameters,
                                     std::array<double, 4> numbers, bool nesterov) {
  dg_sgd_options options = DG_SGD_OPTIONS_INIT;
  options.learning_rate = numbers[0];
  options.momentum = numbers[1];
  options.dampening = numbers[2];
  options.weight_decay = numbers[3];
  options.flags = nesterov ? DG_SGD_NESTEROV : 0;
  return Out<OptimizerHandle>(dg_optimizer_create_sgd, worker, ToStr(name), parameters.data(),
                              parameters.size(), &options);
}

OptimizerHandle optimizer_create_adam(WorkerHandle worker, rust::Str name, Tensors parameters,
                                      std::array<double, 5> numbers, bool amsgrad, bool decoupled) {
  dg_adam_options options = DG_ADAM_OPTIONS_INIT;
  options.learning_rate = numbers[0];
  options.beta1 = numbers[1];
  options.beta2 = numbers[2];
  options.epsilon = numbers[3];
  options.weight_decay = numbers[4];
  options.flags = amsgrad ? DG_ADAM_AMSGRAD : 0;
  return Out<OptimizerHandle>(decoupled ? dg_optimizer_create_adamw : dg_optimizer_create_adam,
                              worker, ToStr(name), parameters.data(), parameters.size(), &options);
}

rust::Vec<RawNamedTensor> optimizer_state(OptimizerHandle optimizer) {
  return NamedTensors(
      [=](auto visit, void* data) { return dg_optimizer_state(optimizer, visit, data); });
}

void optimizer_set_workers(OptimizerHandle optimizer, Texts workers) {
  const std::vector<dg_str> names = ToStrs(workers);
  dg::Check(dg_optimizer_set_workers(optimizer, names.data(), names.size()));
}
void optimizer_load_state(OptimizerHandle optimizer, Texts names, Tensors tensors) {
  const std::vector<dg_str> strs = ToStrs(names);
  dg::Check(dg_optimizer_load_state(optimizer, strs.data(), tensors.data(), tensors.size()));
}

void optimizer_save(OptimizerHandle optimizer, Texts names, Tensors parameters, rust::Str path) {
  const std::vector<dg_str> strs = ToStrs(names);
  dg::Check(
      dg_optimizer_save(optimizer, strs.data(), parameters.data(), parameters.size(), ToStr(path)));
}
void optimizer_load(OptimizerHandle optimizer, Texts names, Tensors parameters, rust::Str path) {
  const std::vector<dg_str> strs = ToStrs(names);
  dg::Check(
      dg_optimizer_load(optimizer, strs.data(), parameters.data(), parameters.size(), ToStr(path)));
}

void safetensors_save(rust::Str path, Texts names, Tensors tensors, Texts keys, Texts values) {
  const std::vector<dg_str> strs = ToStrs(names);
  std::vector<dg_entry> metadata;
  for (size_t i = 0; i < keys.size(); ++i) metadata.push_back({ToStr(keys[i]), ToStr(values[i])});
  dg::Check(dg_safetensors_save(ToStr(path), strs.data(), tensors.data(), tensors.size(),
                                metadata.data(), metadata.size()));
}

rust::Vec<RawNamedTensor> safetensors_load(rust::Str path) {
  return NamedTensors(
      [=](auto visit, void* data) { return dg_safetensors_load(ToStr(path), visit, data); });
}

void safetensors_load_into(rust::Str path, Texts names, Tensors tensors) {
  const std::vector<dg_str> strs = ToStrs(names);
  dg::Check(dg_safetensors_load_into(ToStr(path), strs.data(), tensors.data(), tensors.size()));
}

rust::Vec<RawSafetensorsInfo> safetensors_file_tensors(SafetensorsFileHandle file) {
  rust::Vec<RawSafetensorsInfo> tensors;
  const auto add = [](void* data, const dg_safetensors_info* info) {
    static_cast<rust::Vec<RawSafetensorsInfo>*>(data)->push_back(
        {ToString(info->name), info->dtype, ToVec(info->shape, info->dim_count), info->bytes});
  };
  dg::Check(dg_safetensors_file_tensors(file, add, &tensors));
  return tensors;
}

rust::Vec<RawEntry> safetensors_file_metadata(SafetensorsFileHandle file) {
  rust::Vec<RawEntry> metadata;
  const auto add = [](void* data, const dg_entry* entry) {
    static_cast<rust::Vec<RawEntry>*>(data)->push_back(ToEntry(*entry));
  };
  dg::Check(dg_safetensors_file_metadata(file, add, &metadata));
  return metadata;
}

CheckpointPartHandle checkpoint_part_create(WorkerHandle worker, rust::Str name,
                                            const RawCheckpointContents& from,
                                            rust::Box<PartFunctions> functions) {
  const std::vector<dg_str> tensor_names = ToStrs(from.tensor_names);
  const std::vector<dg_str> optimizer_names = ToStrs(from.optimizer_names);
  dg_checkpoint_contents contents = DG_CHECKPOINT_CONTENTS_INIT;
  contents.tensor_names = tensor_names.data();
  contents.tensors = from.tensors.data();
  contents.tensor_count = from.tensors.size();
  contents.optimizer_names = optimizer_names.data();
  contents.optimizers = from.optimizers.data();
  contents.optimizer_count = from.optimizers.size();
  if (from.saves_values) contents.save_values = SaveValues;
  if (from.loads_values) contents.load_values = LoadValues;
  dg_checkpoint_part* out = nullptr;
  dg::Check(dg_checkpoint_part_create(worker, ToStr(name), &contents, Leak(std::move(functions)),
                                      End<PartFunctions>, &out));
  return out;
}

CheckpointManagerHandle checkpoint_manager_create(WorkerHandle worker, rust::Str folder,
                                                  const RawCheckpointManagerOptions& from) {
  const ManagerOptions options(from);
  return Out<CheckpointManagerHandle>(dg_checkpoint_manager_create, worker, ToStr(folder),
                                      &options.options);
}

RawLoadedCheckpoint checkpoint_manager_load(CheckpointManagerHandle manager, RawLoadOptions from) {
  const dg_checkpoint_load_options options = ToOptions(from);
  return ToLoaded(Out<dg_loaded_checkpoint*>(dg_checkpoint_manager_load, manager, &options));
}

RawLoadedCheckpoint load_checkpoint(WorkerHandle worker, rust::Str folder, RawLoadOptions from,
                                    const RawCheckpointManagerOptions& of) {
  const dg_checkpoint_load_options options = ToOptions(from);
  const ManagerOptions manager(of);
  return ToLoaded(Out<dg_loaded_checkpoint*>(dg_checkpoint_load, worker, ToStr(folder), &options,
                                             &manager.options));
}

DataParallelHandle data_parallel_create(Tensors parameters, const RawDataParallelOptions& from,
                                        rust::Box<Forward> forward) {
  const std::vector<dg_str> devices = ToStrs(from.devices);
  dg_data_parallel_options options = DG_DATA_PARALLEL_OPTIONS_INIT;
  options.devices = devices.data();
  options.device_count = devices.size();
  options.output_device = ToStr(from.output_device);
  options.dim = from.dim;
  options.buffers = from.buffers.data();
  options.buffer_count = from.buffers.size();
  options.bucket_bytes = from.bucket_bytes;
  options.timeout_ms = from.timeout_ms;
  dg_data_parallel* out = nullptr;
  dg::Check(dg_data_parallel_create(parameters.data(), parameters.size(), &options, RunForward,
                                    Leak(std::move(forward)), End<Forward>, &out));
  return out;
}

rust::Vec<TensorHandle> data_parallel_forward(DataParallelHandle data_parallel, Tensors inputs,
                                              size_t output_count) {
  std::vector<dg_tensor*> outs(output_count);
  dg::Check(dg_data_parallel_forward(data_parallel, inputs.data(), inputs.size(), outs.data(),
                                     outs.size()));
  return ToVec(outs);
}

rust::Vec<TensorHandle> scatter(TensorHandle tensor, Texts devices, int64_t dim, Numbers sizes) {
  const std::vector<dg_str> names = ToStrs(devices);
  std::vector<dg_tensor*> outs(names.size());
  size_t count = 0;
  dg::Check(dg_scatter(tensor, names.data(), names.size(), dim,
                       sizes.empty() ? nullptr : sizes.data(), outs.data(), &count));
  outs.resize(count);
  return ToVec(outs);
}

rust::Vec<TensorHandle> broadcast(Tensors tensors, Texts devices) {
  const std::vector<dg_str> names = ToStrs(devices);
  std::vector<dg_tensor*> outs(tensors.size() * names.size());
  dg::Check(dg_broadcast(tensors.data(), tensors.size(), names.data(), names.size(), outs.data()));
  return ToVec(outs);
}

rust::Vec<TensorHandle> reduce_add(Tensors tensors, size_t list_count, rust::Str device) {
  const size_t length = list_count == 0 ? 0 : tensors.size() / list_count;
  std::vector<dg_tensor*> outs(length);
  dg::Check(dg_reduce_add(tensors.data(), list_count, length, ToStr(device), outs.data()));
  return ToVec(outs);
}

ProcessGroupHandle process_group_create(WorkerHandle worker, const RawProcessGroupOptions& from) {
  dg_process_group_options options = DG_PROCESS_GROUP_OPTIONS_INIT;
  options.name = ToStr(from.name);
  options.rank = from.rank;
  options.size = from.size;
  options.backend = ToStr(from.backend);
  options.host = ToStr(from.host);
  options.timeout_ms = from.timeout_ms;
  options.join_timeout_ms = from.join_timeout_ms;
  return Out<ProcessGroupHandle>(dg_process_group_create, worker, &options);
}

AveragerHandle averager_create(ProcessGroupHandle group, Tensors parameters, Tensors buffers,
                               uint64_t bucket_bytes, bool divide_by_active) {
  dg_gradient_averager_options options = DG_GRADIENT_AVERAGER_OPTIONS_INIT;
  options.flags = divide_by_active ? DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE : 0;
  options.bucket_bytes = bucket_bytes;
  options.buffers = buffers.data();
  options.buffer_count = buffers.size();
  return Out<AveragerHandle>(dg_gradient_averager_create, group, parameters.data(),
                             parameters.size(), &options);
}

}  // namespace distgrad_rust
