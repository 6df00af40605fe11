#include "distgrad/src/ffi/shim.h"

#include <utility>

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
struct Registration {
  WorkerHandle worker;
  rust::Box<Handler> handler;
};

dg_error* Serve(void* user_data, const dg_request* request, dg_message** reply) noexcept {
  const auto* registration = static_cast<const Registration*>(user_data);
  // Handles are numbers: borrowed ones are not written through on the other side.
  const RawRequest raw{registration->worker,
                       ToBytes(request->function),
                       request->from,
                       const_cast<dg_message*>(request->message),
                       const_cast<dg_context*>(request->context),
                       request->timeout_ms};
  return registration->handler->serve(raw, *reply);
}

}  // namespace

TensorHandle tensor_from_memory(uint8_t* data, int32_t dtype, Numbers shape,
                                rust::Box<Owner> owner) {
  dg_tensor* out = nullptr;
  dg::Check(dg_tensor_from_memory(data, dtype, shape.data(), nullptr, shape.size(),
                                  Leak(std::move(owner)), End<Owner>, &out));
  return out;
}

TensorHandle op_tensor(rust::Str op, Values arguments) {
  dg_tensor* out = nullptr;
  dg::Check(dg_op_tensors(ToStr(op), arguments.data(), arguments.size(), &out, 1));
  return out;
}

void future_then(FutureHandle future, rust::Box<Callback> callback) {
  dg::Check(dg_future_then(
      future, [](void* data) { static_cast<const Callback*>(data)->run(); },
      Leak(std::move(callback)), End<Callback>));
}

void wait(Waiting& waiting) {
  dg::Check(dg_wait([](void* data) { static_cast<Waiting*>(data)->wait(); }, &waiting));
}

WorkerHandle worker_create(const RawWorkerOptions& from) {
  dg_worker_options options = DG_WORKER_OPTIONS_INIT;
  options.name = ToStr(from.name);
  options.rank = from.rank;
  options.world_size = from.world_size;
  options.rendezvous = ToStr(from.rendezvous);
  options.transport = ToStr(from.transport);
  options.host = ToStr(from.host);
  options.key_file = ToStr(from.key_file);
  options.thread_count = from.thread_count;
  options.timeout_ms = from.timeout_ms;
  options.join_timeout_ms = from.join_timeout_ms;
  options.flags = from.flags;
  options.job = ToStr(from.job);
  options.heartbeat_limit_ms = from.heartbeat_limit_ms;
  return Out<WorkerHandle>(dg_worker_create, &options);
}

void worker_register(WorkerHandle worker, rust::Str function, rust::Box<Handler> handler) {
  dg::Check(dg_worker_register(worker, ToStr(function), Serve,
                               new Registration{worker, std::move(handler)},
                               [](void* data) { delete static_cast<Registration*>(data); }));
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

}  // namespace distgrad_rust
