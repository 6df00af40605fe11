// A thin C++17 wrapper over distgrad.h, and nothing else: handles that destroy themselves,
// exceptions instead of errors, closures as handlers. All of it is compiled into the program; only
// the C interface crosses to the library.
//
//   dg_worker_options options = DG_WORKER_OPTIONS_INIT;
//   ...
//   dg::Worker worker(options);
//   worker.Register("square", [](const dg::Request& request) {
//     return dg::Message("", {dg::Op("aten::square", {request.tensor(0)})});
//   });
//   dg::Context context(worker);
//   dg::Message reply = worker.Call("back", "square", dg::Message("", {x}), &context);
//   context.Backward({dg::Op("aten::sum", {reply.tensor(0)})});
//   dg::Tensor gradient = context.Gradient(x);
//
// Each function calls the C function of its name, or the one that its comment names, whose comment
// in distgrad.h holds for arguments, errors, threads and waiting. An error is thrown as a
// dg::Error.
#ifndef DISTGRAD_DISTGRAD_HPP_
#define DISTGRAD_DISTGRAD_HPP_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "distgrad.h"

namespace dg {

// ------------------------------------------------------------------------------------- Errors

class Error : public std::runtime_error {
 public:
  Error(dg_code code, const std::string& message, uint32_t origin = DG_ORIGIN_NONE,
        uint32_t rank = 0)
      : std::runtime_error(message), code_(code), origin_(origin), rank_(rank) {}
  dg_code code() const noexcept { return code_; }
  // Returns DG_ORIGIN_...: whether distgrad or a handler gave the error. Unless it is
  // DG_ORIGIN_NONE, rank() is the worker's.
  uint32_t origin() const noexcept { return origin_; }
  uint32_t rank() const noexcept { return rank_; }

 private:
  dg_code code_;
  uint32_t origin_, rank_;
};

inline dg_str Str(std::string_view text) noexcept { return dg_str{text.data(), text.size()}; }
inline std::string_view View(dg_str text) noexcept { return {text.data, text.size}; }
namespace internal {
inline std::vector<dg_str> Strs(const std::vector<std::string>& texts) {
  std::vector<dg_str> strs;
  for (const std::string& text : texts) strs.push_back(Str(text));
  return strs;
}
}  // namespace internal

// Takes the result of a C function, and throws it if it is an error.
inline void Check(dg_error* error) {
  if (error == nullptr) return;
  const std::unique_ptr<dg_error, void (*)(dg_error*)> owner(
      error, [](dg_error* e) { dg_error_destroy(e); });
  uint32_t rank = 0;
  const uint32_t origin = dg_error_origin(error, &rank);
  throw Error(dg_error_code(error), std::string(View(dg_error_message(error))), origin, rank);
}

// Returns DG_ABI_MAJOR << 16 | DG_ABI_MINOR of the loaded library.
inline uint32_t AbiVersion() noexcept { return dg_abi_version(); }
// Returns the version of the libtorch that the library was built with.
inline std::string_view TorchVersion() noexcept { return View(dg_torch_version()); }

// Reports to the launcher, torchrun for instance, why this process fails.
inline void ReportFailure(const Error& failure) {
  Check(dg_report_failure(failure.code(), Str(failure.what())));
}

// The reverse, for callbacks: runs `run`, and returns what it throws as an error.
template <typename F>
dg_error* Catch(F&& run) noexcept {
  try {
    run();
    return nullptr;
  } catch (const Error& error) {
    return dg_error_create_with_origin(error.code(), Str(error.what()), error.origin(),
                                       error.rank());
  } catch (const std::exception& error) {
    return dg_error_create(DG_INTERNAL, Str(error.what()));
  } catch (...) {
    return dg_error_create(DG_INTERNAL, DG_STR("a callback threw"));
  }
}

// Owns a handle. Movable.
template <typename T, void (*kDestroy)(T*) noexcept>
class Handle {
 public:
  explicit Handle(T* handle = nullptr) noexcept : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Handle() { kDestroy(handle_); }

  T* get() const noexcept { return handle_; }
  T* release() noexcept { return std::exchange(handle_, nullptr); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }

 private:
  T* handle_;
};

// ------------------------------------------------------------------------------------ Tensors

template <typename T>
constexpr dg_dtype DtypeOf() = delete;
template <>
constexpr dg_dtype DtypeOf<float>() {
  return DG_FLOAT32;
}
template <>
constexpr dg_dtype DtypeOf<double>() {
  return DG_FLOAT64;
}
template <>
constexpr dg_dtype DtypeOf<int64_t>() {
  return DG_INT64;
}
template <>
constexpr dg_dtype DtypeOf<int32_t>() {
  return DG_INT32;
}
template <>
constexpr dg_dtype DtypeOf<uint8_t>() {
  return DG_UINT8;
}

namespace internal {
// Returns the sizes of a tensor, or its strides in elements. Empty if `tensor` is null.
inline std::vector<int64_t> Layout(const dg_tensor* tensor, bool sizes) {
  std::vector<int64_t> numbers(dg_tensor_dim_count(tensor));
  size_t count = 0;
  if (tensor != nullptr) {
    int64_t* const room = numbers.data();
    Check(dg_tensor_layout(tensor, sizes ? room : nullptr, sizes ? nullptr : room, numbers.size(),
                           &count));
  }
  numbers.resize(count);
  return numbers;
}
}  // namespace internal

// A reference to a tensor; a copy refers to the same tensor. A null one is no tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(dg_tensor* handle) noexcept : handle_(handle) {}
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor(const Tensor& other) : handle_(Clone(other.get())) {}
  Tensor& operator=(const Tensor& other) { return *this = Tensor(other); }

  // Creates a tensor with a copy of `data`, in row-major order.
  template <typename T>
  static Tensor From(const std::vector<T>& data, const std::vector<int64_t>& shape) {
    uint64_t count = 1;  // the library refuses a shape that is too large
    for (int64_t size : shape) count *= static_cast<uint64_t>(size);
    if (count != data.size()) {
      throw Error(DG_INVALID_ARGUMENT, "the data's size is not the shape's");
    }
    dg_tensor* out = nullptr;
    Check(dg_tensor_from_data(data.data(), DtypeOf<T>(), shape.data(), shape.size(), &out));
    return Tensor(out);
  }
  // Creates a tensor over the caller's memory, which has to stay until `destroy` is called, on any
  // thread; that must not throw. Empty strides: row-major.
  static Tensor FromMemory(void* data, dg_dtype dtype, const std::vector<int64_t>& shape,
                           const std::vector<int64_t>& strides, std::function<void()> destroy) {
    if (!strides.empty() && strides.size() != shape.size()) {
      throw Error(DG_INVALID_ARGUMENT, "there is not one stride for each dimension");
    }
    using Destroy = std::function<void()>;
    dg_tensor* out = nullptr;
    Check(dg_tensor_from_memory(
        data, dtype, shape.data(), strides.empty() ? nullptr : strides.data(), shape.size(),
        new Destroy(std::move(destroy)),
        [](void* user_data) {
          const std::unique_ptr<Destroy> owner(static_cast<Destroy*>(user_data));
          if (*owner) (*owner)();
        },
        &out));
    return Tensor(out);
  }
  // Imports a tensor of another library, without a copy. Takes `managed`.
  static Tensor FromDlpack(DLManagedTensorVersioned* managed) {
    dg_tensor* out = nullptr;
    Check(dg_tensor_from_dlpack(managed, &out));
    return Tensor(out);
  }
  // Exports the tensor without a copy. The caller calls the deleter of the result.
  DLManagedTensorVersioned* ToDlpack() const {
    DLManagedTensorVersioned* out = nullptr;
    Check(dg_tensor_to_dlpack(get(), &out));
    return out;
  }
  // For programs that link the same libtorch: from an `at::Tensor`, and the `at::Tensor` of this
  // one, which lives as long as it.
  static Tensor FromTorch(const void* torch_tensor) {
    dg_tensor* out = nullptr;
    Check(dg_tensor_from_torch(torch_tensor, &out));
    return Tensor(out);
  }
  void* torch() const noexcept { return dg_tensor_torch(get()); }
  // Creates one more reference to a borrowed handle.
  static Tensor FromBorrowed(const dg_tensor* handle) { return Tensor(Clone(handle)); }

  dg_dtype dtype() const noexcept { return dg_tensor_dtype(get()); }
  // A dimension along which the parts of a nested tensor differ has size -1.
  std::vector<int64_t> shape() const { return internal::Layout(get(), true); }
  // Returns the strides in elements. DG_FAILED_PRECONDITION for a sparse or nested tensor.
  std::vector<int64_t> strides() const { return internal::Layout(get(), false); }
  int64_t element_count() const noexcept { return dg_tensor_element_count(get()); }
  std::string_view device() const noexcept { return View(dg_tensor_device(get())); }
  bool requires_grad() const noexcept { return dg_tensor_requires_grad(get()); }
  void RequireGrad() { Check(dg_tensor_require_grad(get())); }
  Tensor Detach() const {
    dg_tensor* out = nullptr;
    Check(dg_tensor_detach(get(), &out));
    return Tensor(out);
  }
  // Returns the address of the first element. DG_INVALID_ARGUMENT for another dtype.
  template <typename T>
  T* data() const {
    void* out = nullptr;
    Check(dg_tensor_data(get(), &out));
    if (dtype() != DtypeOf<T>()) throw Error(DG_INVALID_ARGUMENT, "the tensor has another dtype");
    return static_cast<T*>(out);
  }

  dg_tensor* get() const noexcept { return handle_.get(); }
  dg_tensor* release() noexcept { return handle_.release(); }
  explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

 private:
  static dg_tensor* Clone(const dg_tensor* handle) {
    dg_tensor* out = nullptr;
    if (handle != nullptr) Check(dg_tensor_clone(handle, &out));
    return out;
  }
  Handle<dg_tensor, dg_tensor_destroy> handle_;
};

namespace internal {
inline std::vector<const dg_tensor*> Handles(const std::vector<Tensor>& tensors) {
  std::vector<const dg_tensor*> handles;
  for (const Tensor& tensor : tensors) handles.push_back(tensor.get());
  return handles;
}
}  // namespace internal

// Passes the lines of the library's log to `sink`, with DG_LOG_...; null restores standard error.
// `sink` must not throw, wait or call the library.
inline void SetLogSink(std::function<void(uint32_t severity, std::string_view text)> sink) {
  using Sink = std::function<void(uint32_t, std::string_view)>;
  if (sink == nullptr) return Check(dg_log_set_sink(nullptr, nullptr, nullptr));
  Check(dg_log_set_sink([](void* data, uint32_t severity,
                           dg_str text) { (*static_cast<Sink*>(data))(severity, View(text)); },
                        new Sink(std::move(sink)),
                        [](void* data) { delete static_cast<Sink*>(data); }));
}

// Sets how many threads one operator on the CPU may use.
inline void SetNumThreads(uint32_t count) { Check(dg_set_num_threads(count)); }
inline uint32_t NumThreads() noexcept { return dg_num_threads(); }

// Returns whether operators on this thread are recorded.
inline bool GradEnabled() noexcept { return dg_grad_enabled(); }

// Seeds torch's random number generators, of all devices.
inline void ManualSeed(uint64_t seed) { Check(dg_manual_seed(seed)); }

// While it lives, operators on this thread are recorded, or are not.
template <bool kEnabled>
class GradMode {
 public:
  GradMode() noexcept : before_(dg_grad_set_enabled(kEnabled)) {}
  ~GradMode() { dg_grad_set_enabled(before_); }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  const bool before_;
};
using NoGrad = GradMode<false>;
using EnableGrad = GradMode<true>;

// ---------------------------------------------------------------------------------- Operators

// An argument of an operator. It borrows what it is made from, until the end of the statement.
class Value {
 public:
  Value() noexcept : value_(dg_value_none()) {}
  Value(std::nullptr_t) noexcept : value_(dg_value_none()) {}  // NOLINT: implicit
  // A template, for a pointer, such as a dg_tensor, would convert to bool.
  template <typename T, typename = std::enable_if_t<std::is_same_v<T, bool>>>
  Value(T value) noexcept : value_(dg_value_bool(value)) {}                      // NOLINT: implicit
  Value(int value) noexcept : value_(dg_value_integer(value)) {}                 // NOLINT: implicit
  Value(int64_t value) noexcept : value_(dg_value_integer(value)) {}             // NOLINT: implicit
  Value(double value) noexcept : value_(dg_value_real(value)) {}                 // NOLINT: implicit
  Value(const char* value) noexcept : value_(dg_value_string(Str(value))) {}     // NOLINT: implicit
  Value(const Tensor& value) noexcept : value_(dg_value_tensor(value.get())) {}  // NOLINT: implicit
  Value(const std::vector<int64_t>& value) noexcept                              // NOLINT: implicit
      : value_(dg_value_integers(value.data(), value.size())) {}
  Value(const std::vector<double>& value) noexcept  // NOLINT: implicit
      : value_(dg_value_reals(value.data(), value.size())) {}
  Value(const std::vector<Tensor>& value)  // NOLINT: implicit
      : tensors_(std::make_shared<std::vector<const dg_tensor*>>(internal::Handles(value))),
        value_(dg_value_tensors(tensors_->data(), tensors_->size())) {}
  explicit Value(const dg_value& value) noexcept : value_(value) {}
  const dg_value& get() const noexcept { return value_; }

 private:
  std::shared_ptr<std::vector<const dg_tensor*>> tensors_;
  dg_value value_;
};

using Arguments = std::initializer_list<Value>;

namespace internal {
inline std::vector<dg_value> ToValues(Arguments arguments) {
  std::vector<dg_value> values;
  for (const Value& argument : arguments) values.push_back(argument.get());
  return values;
}
}  // namespace internal

// The results of an operator.
class Values {
 public:
  explicit Values(dg_values* handle) noexcept : handle_(handle) {}

  size_t size() const noexcept { return dg_values_count(get()); }
  // Returns one, of any kind. What it points to lives as long as this object.
  dg_value at(size_t index) const {
    dg_value value;
    Check(dg_values_get(get(), index, &value));
    return value;
  }
  // DG_INVALID_ARGUMENT if that result is not a tensor.
  Tensor tensor(size_t index) const {
    const dg_value value = at(index);
    if (value.kind != DG_VALUE_TENSOR) throw NotATensor(index);
    return Tensor::FromBorrowed(value.as.tensor);
  }
  // Returns all results of an operator that returns tensors, those of lists one after the other.
  // DG_INVALID_ARGUMENT if one of them is neither a tensor nor a list of them: see at().
  std::vector<Tensor> tensors() const {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < size(); ++i) {
      const dg_value value = at(i);
      if (value.kind == DG_VALUE_TENSORS) {
        for (size_t j = 0; j < value.as.tensors.size; ++j) {
          tensors.push_back(Tensor::FromBorrowed(value.as.tensors.data[j]));
        }
      } else {
        tensors.push_back(tensor(i));
      }
    }
    return tensors;
  }

  const dg_values* get() const noexcept { return handle_.get(); }

 private:
  static Error NotATensor(size_t index) {
    return Error(DG_INVALID_ARGUMENT, "result " + std::to_string(index) +
                                          " of the operator is not a tensor; read it with at()");
  }

  Handle<dg_values, dg_values_destroy> handle_;
};

// Runs an operator, whatever its results are (dg_op_call).
inline Values Ops(std::string_view op, Arguments arguments) {
  const std::vector<dg_value> values = internal::ToValues(arguments);
  dg_values* out = nullptr;
  Check(dg_op_call(Str(op), values.data(), values.size(), &out));
  return Values(out);
}

// Throws unless the operator only computes, and writes to none of its arguments
// (dg_op_check_functional).
inline void CheckFunctional(std::string_view op) { Check(dg_op_check_functional(Str(op))); }

// Runs an operator whose result is one tensor (dg_op_tensors).
inline Tensor Op(std::string_view op, Arguments arguments) {
  const std::vector<dg_value> values = internal::ToValues(arguments);
  dg_tensor* out = nullptr;
  Check(dg_op_tensors(Str(op), values.data(), values.size(), &out, 1));
  return Tensor(out);
}

// ----------------------------------------------------------------------------------- Messages

class Message {
 public:
  explicit Message(std::string_view payload = {}, const std::vector<Tensor>& tensors = {}) {
    const std::vector<const dg_tensor*> handles = internal::Handles(tensors);
    dg_message* out = nullptr;
    Check(dg_message_create(payload.data(), payload.size(), handles.data(), handles.size(), &out));
    handle_ = Handle<dg_message, dg_message_destroy>(out);
  }
  explicit Message(dg_message* handle) noexcept : handle_(handle) {}

  std::string_view payload() const noexcept { return View(dg_message_payload(get())); }
  size_t tensor_count() const noexcept { return dg_message_tensor_count(get()); }
  Tensor tensor(size_t index) const {
    dg_tensor* out = nullptr;
    Check(dg_message_tensor(get(), index, &out));
    return Tensor(out);
  }

  dg_message* get() const noexcept { return handle_.get(); }
  dg_message* release() noexcept { return handle_.release(); }

 private:
  Handle<dg_message, dg_message_destroy> handle_;
};

class Future {
 public:
  explicit Future(dg_future* handle) noexcept : handle_(handle) {}

  // Returns whether it is done.
  bool Wait(int64_t timeout_ms = DG_FOREVER) const {
    bool done = false;
    Check(dg_future_wait(get(), timeout_ms, &done));
    return done;
  }
  // Waits, and returns the reply (dg_future_result); null for work without one.
  Message Get() const {
    Wait();
    dg_message* reply = nullptr;
    Check(dg_future_result(get(), &reply));
    return Message(reply);
  }
  // Waits, and returns the results of an operator (dg_future_values).
  Values GetValues() const {
    Wait();
    dg_values* values = nullptr;
    Check(dg_future_values(get(), &values));
    return Values(values);
  }
  // Calls `done` once it is done; `done` must not throw or wait.
  void Then(std::function<void()> done) const {
    using Done = std::function<void()>;
    Check(dg_future_then(
        get(), [](void* data) { (*static_cast<Done*>(data))(); }, new Done(std::move(done)),
        [](void* data) { delete static_cast<Done*>(data); }));
  }
  void Cancel() const { Check(dg_future_cancel(get())); }
  dg_future* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_future, dg_future_destroy> handle_;
};

// Which futures are done, for the program's own event loop: `descriptor` is readable while there is
// something to take.
class Completions {
 public:
  Completions() {
    dg_completions* out = nullptr;
    Check(dg_completions_create(&out));
    handle_ = Handle<dg_completions, dg_completions_destroy>(out);
  }
  int descriptor() const noexcept { return dg_completions_descriptor(get()); }
  // Puts `tag` into the queue once the future is done.
  void Watch(const Future& future, uint64_t tag) {
    Check(dg_completions_watch(get(), future.get(), tag));
  }
  // Takes the tags of all that are done. Does not wait.
  std::vector<uint64_t> Take() {
    std::vector<uint64_t> taken;
    uint64_t tags[64];
    size_t count = 0;
    do {
      Check(dg_completions_take(get(), tags, 64, &count));
      taken.insert(taken.end(), tags, tags + count);
    } while (count == 64);
    return taken;
  }
  dg_completions* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_completions, dg_completions_destroy> handle_;
};

namespace internal {
// Calls `cancelled`, which must not throw or wait, once it is cancelled. Returns a number for
// Forget(), 0 if it was called.
inline uint64_t OnCancel(const dg_cancellation* cancellation, std::function<void()> cancelled) {
  using Callback = std::function<void()>;
  uint64_t id = 0;
  Check(dg_cancellation_on_cancel(
      cancellation, [](void* data) { (*static_cast<Callback*>(data))(); },
      new Callback(std::move(cancelled)), [](void* data) { delete static_cast<Callback*>(data); },
      &id));
  return id;
}
// Removes a callback, which then does not run and is not called any more.
inline void Forget(const dg_cancellation* cancellation, uint64_t id) {
  Check(dg_cancellation_forget(cancellation, id));
}
}  // namespace internal

class Cancellation {
 public:
  Cancellation() {
    dg_cancellation* out = nullptr;
    Check(dg_cancellation_create(&out));
    handle_ = Handle<dg_cancellation, dg_cancellation_destroy>(out);
  }
  void Cancel() { Check(dg_cancellation_cancel(get())); }
  // Throws an error that says why, if it is cancelled.
  void ThrowIfCancelled() const { Check(dg_cancellation_check(get())); }
  uint64_t OnCancel(std::function<void()> cancelled) const {
    return internal::OnCancel(get(), std::move(cancelled));
  }
  void Forget(uint64_t id) const { internal::Forget(get(), id); }
  dg_cancellation* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_cancellation, dg_cancellation_destroy> handle_;
};

// ------------------------------------------------------------------------------------ Workers

class Context;

// A context that somebody else keeps: a Context, or the one that a function or a handler is given.
// Valid as long as that.
class ContextRef {
 public:
  ContextRef(const Context& context) noexcept;  // NOLINT: implicit
  explicit ContextRef(const dg_context* context) noexcept : context_(context) {}

  uint64_t id() const noexcept { return dg_context_id(get()); }
  void Backward(const std::vector<Tensor>& roots,
                const dg_backward_options& options = DG_BACKWARD_OPTIONS_INIT) const {
    const std::vector<const dg_tensor*> handles = internal::Handles(roots);
    Check(dg_context_backward(get(), handles.data(), handles.size(), &options));
  }
  // The same without waiting. Future::Wait() and Get() wait for it; Get() throws its error.
  Future BackwardAsync(const std::vector<Tensor>& roots,
                       const dg_backward_options& options = DG_BACKWARD_OPTIONS_INIT) const {
    const std::vector<const dg_tensor*> handles = internal::Handles(roots);
    dg_future* out = nullptr;
    Check(dg_context_backward_async(get(), handles.data(), handles.size(), &options, &out));
    return Future(out);
  }
  Tensor Gradient(const Tensor& leaf) const {
    dg_tensor* out = nullptr;
    Check(dg_context_gradient(get(), leaf.get(), &out));
    return Tensor(out);
  }
  // Returns every leaf of this worker that has a gradient, with the gradient, in no order.
  std::vector<std::pair<Tensor, Tensor>> Gradients() const {
    using Pairs = std::vector<std::pair<Tensor, Tensor>>;
    struct Visit {
      Pairs pairs;
      std::exception_ptr thrown;
    } visited;
    Check(dg_context_gradients(
        get(),
        [](void* data, const dg_tensor* leaf, const dg_tensor* gradient) {
          Visit& visit = *static_cast<Visit*>(data);
          try {
            if (!visit.thrown) {
              visit.pairs.emplace_back(Tensor::FromBorrowed(leaf), Tensor::FromBorrowed(gradient));
            }
          } catch (...) {
            visit.thrown = std::current_exception();
          }
        },
        &visited));
    if (visited.thrown) std::rethrow_exception(visited.thrown);
    return std::move(visited.pairs);
  }
  void SetGradient(const Tensor& leaf, const Tensor& gradient) const {
    Check(dg_context_set_gradient(get(), leaf.get(), gradient.get()));
  }
  const dg_context* get() const noexcept { return context_; }

 private:
  const dg_context* context_;
};

// The request that a handler gets; borrowed for the call.
class Request {
 public:
  explicit Request(const dg_request* request) noexcept
      : request_(request), begin_(std::chrono::steady_clock::now()) {}
  std::string_view function() const noexcept { return View(request_->function); }
  uint32_t from() const noexcept { return static_cast<uint32_t>(request_->from); }
  std::string_view payload() const noexcept { return View(dg_message_payload(request_->message)); }
  size_t tensor_count() const noexcept { return dg_message_tensor_count(request_->message); }
  Tensor tensor(size_t index) const {
    dg_tensor* out = nullptr;
    Check(dg_message_tensor(request_->message, index, &out));
    return Tensor(out);
  }
  // Returns the caller's context. If the call was made in none, its id() is 0, and all else that is
  // done with it throws DG_INVALID_ARGUMENT.
  ContextRef context() const noexcept { return ContextRef(request_->context); }
  // Returns options for nested calls: in the caller's context, with what is left of its timeout,
  // and cancelled with its call.
  dg_call_options Nested() const noexcept {
    dg_call_options options = DG_CALL_OPTIONS_INIT;
    options.context = request_->context;
    options.timeout_ms = request_->timeout_ms;
    if (options.timeout_ms > 0) {
      const int64_t elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                                     std::chrono::steady_clock::now() - begin_)
                                     .count();
      options.timeout_ms = std::max<int64_t>(options.timeout_ms - elapsed_ms, 1);
    }
    options.cancellation = request_->cancellation;
    return options;
  }
  // Throws an error that says why, if nobody waits for the answer any more.
  void ThrowIfCancelled() const { Check(dg_cancellation_check(request_->cancellation)); }
  uint64_t OnCancel(std::function<void()> cancelled) const {
    return internal::OnCancel(request_->cancellation, std::move(cancelled));
  }
  void Forget(uint64_t id) const { internal::Forget(request_->cancellation, id); }
  const dg_request& get() const noexcept { return *request_; }

 private:
  const dg_request* request_;
  std::chrono::steady_clock::time_point begin_;
};

// Carries the answer of a handler that answers later. Destroying it without an answer gives the
// caller DG_INTERNAL.
class Responder {
 public:
  explicit Responder(dg_responder* handle) noexcept : handle_(handle) {}
  void Answer(Message reply) {
    Check(dg_responder_answer(handle_.release(), reply.release(), nullptr));
  }
  void Fail(dg_code code, std::string_view message) {
    Check(dg_responder_answer(handle_.release(), nullptr, dg_error_create(code, Str(message))));
  }
  // Passes on an error that another call threw, with its origin.
  void Fail(const Error& error) {
    Check(dg_responder_answer(handle_.release(), nullptr, Catch([&] { throw error; })));
  }
  dg_responder* get() const noexcept { return handle_.get(); }
  dg_responder* release() noexcept { return handle_.release(); }

 private:
  Handle<dg_responder, dg_responder_destroy> handle_;
};

struct Member {
  std::string name;
  uint32_t rank;
  uint64_t incarnation;
};

struct MemberEvent {
  uint64_t kind;  // DG_MEMBER_...
  std::string name;
  uint32_t rank;
  uint64_t incarnation;
  std::string reason;
};

class Worker {
 public:
  using Handler = std::function<Message(const Request&)>;
  // Moves the responder to where the answer will be known. What the Request stands for lives until
  // then, but not the Request: copy it. An exception that it throws before that is the answer.
  using ResponderHandler = std::function<void(const Request&, Responder&&)>;

  explicit Worker(const dg_worker_options& options) {
    dg_worker* out = nullptr;
    Check(dg_worker_create(&options, &out));
    handle_ = Handle<dg_worker, dg_worker_destroy>(out);
  }

  uint32_t rank() const noexcept { return dg_worker_rank(get()); }
  uint32_t world_size() const noexcept { return dg_worker_world_size(get()); }
  std::string_view name(uint32_t of) const noexcept { return View(dg_worker_name(get(), of)); }
  uint32_t local_rank() const noexcept { return dg_worker_local_rank(get()); }
  uint32_t local_world_size() const noexcept { return dg_worker_local_world_size(get()); }
  // Calls `callback`, which must not throw, for each event of a member; null removes it.
  void OnMember(std::function<void(const MemberEvent&)> callback) {
    using Callback = std::function<void(const MemberEvent&)>;
    if (callback == nullptr) {
      return Check(dg_worker_on_member(get(), nullptr, nullptr, nullptr));
    }
    Check(dg_worker_on_member(
        get(),
        [](void* data, const dg_member_event* event) {
          (*static_cast<Callback*>(data))({event->kind, std::string(View(event->name)),
                                           static_cast<uint32_t>(event->rank), event->incarnation,
                                           std::string(View(event->reason))});
        },
        new Callback(std::move(callback)),
        [](void* data) { delete static_cast<Callback*>(data); }));
  }
  size_t context_count() const noexcept { return dg_worker_context_count(get()); }
  void UpdateMembers() { Check(dg_worker_update_members(get())); }
  std::vector<Member> members() const {
    std::vector<Member> members;
    Check(dg_worker_members(
        get(),
        [](void* data, const dg_member* member) {
          static_cast<std::vector<Member>*>(data)->push_back({std::string(View(member->name)),
                                                              static_cast<uint32_t>(member->rank),
                                                              member->incarnation});
        },
        &members));
    return members;
  }
  // Calls `visit` for each context that this worker knows of; its argument is borrowed for the
  // visit.
  template <typename F>
  void Contexts(F&& visit) const {
    std::exception_ptr thrown;
    auto run = [&](const dg_context_state& context) {
      try {
        if (!thrown) visit(context);
      } catch (...) {
        thrown = std::current_exception();
      }
    };
    Check(dg_worker_contexts(
        get(),
        [](void* data, const dg_context_state* context) {
          (*static_cast<decltype(run)*>(data))(*context);
        },
        &run));
    if (thrown) std::rethrow_exception(thrown);
  }
  std::string MetricsText() const {
    dg_message* out = nullptr;
    Check(dg_worker_metrics_text(get(), &out));
    return std::string(Message(out).payload());
  }
  void StartTrace(const dg_trace_options& options = DG_TRACE_OPTIONS_INIT) {
    Check(dg_worker_start_trace(get(), &options));
  }
  std::string StopTrace() {
    dg_message* out = nullptr;
    Check(dg_worker_stop_trace(get(), &out));
    return std::string(Message(out).payload());
  }

  void Register(std::string_view function, Handler handler) {
    Check(dg_worker_register(get(), Str(function), Serve, new Handler(std::move(handler)),
                             [](void* data) { delete static_cast<Handler*>(data); }));
  }

  void RegisterResponder(std::string_view function, ResponderHandler handler) {
    Check(dg_worker_register_responder(
        get(), Str(function), ServeLater, new ResponderHandler(std::move(handler)),
        [](void* data) { delete static_cast<ResponderHandler*>(data); }));
  }

  Message Call(std::string_view to, std::string_view function, const Message& request,
               const dg_call_options& options) {
    dg_message* reply = nullptr;
    Check(dg_worker_call(get(), Str(to), Str(function), request.get(), &options, &reply));
    return Message(reply);
  }
  Future CallAsync(std::string_view to, std::string_view function, const Message& request,
                   const dg_call_options& options) {
    dg_future* out = nullptr;
    Check(dg_worker_call_async(get(), Str(to), Str(function), request.get(), &options, &out));
    return Future(out);
  }
  Message Call(std::string_view to, std::string_view function, const Message& request,
               const Context* context = nullptr);
  Future CallAsync(std::string_view to, std::string_view function, const Message& request,
                   const Context* context = nullptr);
  // Runs an operator there, and returns its results.
  Values CallOp(std::string_view to, std::string_view op, Arguments arguments,
                const dg_call_options& options);
  Values CallOp(std::string_view to, std::string_view op, Arguments arguments,
                const Context* context = nullptr);
  // The same without waiting: Future::GetValues() has the results.
  Future CallOpAsync(std::string_view to, std::string_view op, Arguments arguments,
                     const dg_call_options& options);
  Future CallOpAsync(std::string_view to, std::string_view op, Arguments arguments,
                     const Context* context = nullptr);
  // Returns the reply or the error of each worker.
  std::vector<std::variant<Message, Error>> CallEach(const std::vector<std::string>& to,
                                                     std::string_view function,
                                                     const Message& request,
                                                     const dg_call_options& options);
  std::vector<std::variant<Message, Error>> CallEach(const std::vector<std::string>& to,
                                                     std::string_view function,
                                                     const Message& request,
                                                     const Context* context = nullptr);

  void Barrier(int64_t timeout_ms = DG_FOREVER, uint64_t flags = 0) {
    Check(dg_worker_barrier(get(), timeout_ms, flags));
  }
  void Shutdown(int64_t timeout_ms = DG_FOREVER, uint64_t flags = 0) {
    Check(dg_worker_shutdown(get(), timeout_ms, flags));
  }
  void Serve(uint64_t flags = 0) { Check(dg_worker_serve(get(), flags)); }
  void Leave(int64_t timeout_ms = DG_FOREVER) { Check(dg_worker_leave(get(), timeout_ms)); }

  // Ends the worker, and waits for its handlers; the destructor then does not wait.
  void Close(int64_t timeout_ms = DG_FOREVER) { Check(dg_worker_close(get(), timeout_ms)); }

  dg_worker* get() const noexcept { return handle_.get(); }

 private:
  static dg_error* Serve(void* data, const dg_request* request, dg_message** reply) noexcept {
    return Catch([&] { *reply = (*static_cast<Handler*>(data))(Request(request)).release(); });
  }

  static void ServeLater(void* data, const dg_request* request, dg_responder* responder) noexcept {
    Responder owner(responder);
    dg_error* error =
        Catch([&] { (*static_cast<ResponderHandler*>(data))(Request(request), std::move(owner)); });
    if (error != nullptr) dg_error_destroy(dg_responder_answer(owner.release(), nullptr, error));
  }

  Handle<dg_worker, dg_worker_destroy> handle_;
};

// Calls `wait`, which waits for something that is not distgrad's; in a handler, other handlers may
// run meanwhile in its place.
template <typename F>
void Wait(F&& wait) {
  std::exception_ptr thrown;
  auto run = [&] {
    try {
      wait();
    } catch (...) {
      thrown = std::current_exception();
    }
  };
  Check(dg_wait([](void* data) { (*static_cast<decltype(run)*>(data))(); }, &run));
  if (thrown) std::rethrow_exception(thrown);
}

// ----------------------------------------------------------------------------------- Autograd

class Context {
 public:
  explicit Context(Worker& worker) {
    dg_context* out = nullptr;
    Check(dg_context_create(worker.get(), &out));
    handle_ = Handle<dg_context, dg_context_destroy>(out);
  }

  // As those of a ContextRef.
  uint64_t id() const noexcept { return ContextRef(*this).id(); }
  void Backward(const std::vector<Tensor>& roots,
                const dg_backward_options& options = DG_BACKWARD_OPTIONS_INIT) const {
    ContextRef(*this).Backward(roots, options);
  }
  Future BackwardAsync(const std::vector<Tensor>& roots,
                       const dg_backward_options& options = DG_BACKWARD_OPTIONS_INIT) const {
    return ContextRef(*this).BackwardAsync(roots, options);
  }
  Tensor Gradient(const Tensor& leaf) const { return ContextRef(*this).Gradient(leaf); }
  std::vector<std::pair<Tensor, Tensor>> Gradients() const { return ContextRef(*this).Gradients(); }
  void SetGradient(const Tensor& leaf, const Tensor& gradient) const {
    ContextRef(*this).SetGradient(leaf, gradient);
  }
  void Release() { Check(dg_context_release(get())); }
  dg_context* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_context, dg_context_destroy> handle_;
};

inline ContextRef::ContextRef(const Context& context) noexcept : context_(context.get()) {}

namespace internal {
inline dg_call_options In(const Context* context) {
  dg_call_options options = DG_CALL_OPTIONS_INIT;
  if (context == nullptr) return options;
  options.context = context->get();
  // Of one that was moved from. To the library NULL means no context, and nothing would record the
  // call.
  if (options.context == nullptr) {
    throw Error(DG_INVALID_ARGUMENT, "context is NULL, and has to be a valid dg_context");
  }
  return options;
}
}  // namespace internal
inline Message Worker::Call(std::string_view to, std::string_view function, const Message& request,
                            const Context* context) {
  return Call(to, function, request, internal::In(context));
}
inline Future Worker::CallAsync(std::string_view to, std::string_view function,
                                const Message& request, const Context* context) {
  return CallAsync(to, function, request, internal::In(context));
}
inline Values Worker::CallOp(std::string_view to, std::string_view op, Arguments arguments,
                             const Context* context) {
  return CallOp(to, op, arguments, internal::In(context));
}
inline Values Worker::CallOp(std::string_view to, std::string_view op, Arguments arguments,
                             const dg_call_options& options) {
  const std::vector<dg_value> values = internal::ToValues(arguments);
  dg_values* out = nullptr;
  Check(dg_worker_call_op(get(), Str(to), Str(op), values.data(), values.size(), &options, &out));
  return Values(out);
}

inline Future Worker::CallOpAsync(std::string_view to, std::string_view op, Arguments arguments,
                                  const Context* context) {
  return CallOpAsync(to, op, arguments, internal::In(context));
}
inline Future Worker::CallOpAsync(std::string_view to, std::string_view op, Arguments arguments,
                                  const dg_call_options& options) {
  const std::vector<dg_value> values = internal::ToValues(arguments);
  dg_future* out = nullptr;
  Check(dg_worker_call_op_async(get(), Str(to), Str(op), values.data(), values.size(), &options,
                                &out));
  return Future(out);
}

inline std::vector<std::variant<Message, Error>> Worker::CallEach(
    const std::vector<std::string>& to, std::string_view function, const Message& request,
    const Context* context) {
  return CallEach(to, function, request, internal::In(context));
}
inline std::vector<std::variant<Message, Error>> Worker::CallEach(
    const std::vector<std::string>& to, std::string_view function, const Message& request,
    const dg_call_options& options) {
  const std::vector<dg_str> names = internal::Strs(to);
  std::vector<dg_message*> replies(to.size());
  std::vector<dg_error*> errors(to.size());
  Check(dg_worker_call_each(get(), names.data(), names.size(), Str(function), request.get(),
                            &options, replies.data(), errors.data()));
  std::vector<std::variant<Message, Error>> results;
  for (size_t i = 0; i < to.size(); ++i) {
    try {
      Check(errors[i]);
      results.emplace_back(Message(replies[i]));
    } catch (Error& error) {
      results.emplace_back(std::move(error));
    }
  }
  return results;
}

// --------------------------------------------------------------------------- Files of tensors

using TensorMap = std::map<std::string, Tensor>;

namespace internal {
// The names and handles of a TensorMap, which it borrows.
struct NamedHandles {
  explicit NamedHandles(const TensorMap& map) {
    for (const auto& [name, tensor] : map) {
      names.push_back(Str(name));
      tensors.push_back(tensor.get());
    }
  }
  std::vector<dg_str> names;
  std::vector<const dg_tensor*> tensors;
};
}  // namespace internal

// Writes tensors and metadata to a safetensors file, all or nothing (dg_safetensors_save).
inline void SaveSafetensors(const TensorMap& tensors, std::string_view path,
                            const std::map<std::string, std::string>& metadata = {}) {
  const internal::NamedHandles named(tensors);
  std::vector<dg_entry> entries;
  for (const auto& [name, value] : metadata) entries.push_back({Str(name), Str(value)});
  Check(dg_safetensors_save(Str(path), named.names.data(), named.tensors.data(), named.names.size(),
                            entries.data(), entries.size()));
}

// Reads all tensors of a file, onto the CPU.
inline TensorMap LoadSafetensors(std::string_view path) {
  struct Visit {
    TensorMap tensors;
    std::exception_ptr thrown;
  } visited;
  Check(dg_safetensors_load(
      Str(path),
      [](void* data, dg_str name, const dg_tensor* tensor) {
        Visit& visit = *static_cast<Visit*>(data);
        try {
          if (!visit.thrown) visit.tensors.emplace(View(name), Tensor::FromBorrowed(tensor));
        } catch (...) {
          visit.thrown = std::current_exception();
        }
      },
      &visited));
  if (visited.thrown) std::rethrow_exception(visited.thrown);
  return std::move(visited.tensors);
}

// Writes what is in a file to tensors.
inline void LoadSafetensorsInto(std::string_view path, const TensorMap& tensors) {
  const internal::NamedHandles named(tensors);
  Check(dg_safetensors_load_into(Str(path), named.names.data(), named.tensors.data(),
                                 named.names.size()));
}

// A tensor in a file.
struct SafetensorsInfo {
  dg_dtype dtype;
  std::vector<int64_t> shape;
  uint64_t bytes;
};

// A file that is open: its header is in memory, and each tensor is read when it is asked for.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string_view path) {
    dg_safetensors_file* out = nullptr;
    Check(dg_safetensors_file_open(Str(path), &out));
    handle_ = Handle<dg_safetensors_file, dg_safetensors_file_destroy>(out);
  }
  std::map<std::string, SafetensorsInfo> tensors() const {
    std::map<std::string, SafetensorsInfo> tensors;
    Check(dg_safetensors_file_tensors(
        get(),
        [](void* data, const dg_safetensors_info* info) {
          (*static_cast<std::map<std::string, SafetensorsInfo>*>(
              data))[std::string(View(info->name))] = {static_cast<dg_dtype>(info->dtype),
                                                       {info->shape, info->shape + info->dim_count},
                                                       info->bytes};
        },
        &tensors));
    return tensors;
  }
  std::map<std::string, std::string> metadata() const {
    std::map<std::string, std::string> metadata;
    Check(dg_safetensors_file_metadata(
        get(),
        [](void* data, const dg_entry* entry) {
          (*static_cast<std::map<std::string, std::string>*>(
              data))[std::string(View(entry->name))] = View(entry->value);
        },
        &metadata));
    return metadata;
  }
  // Reads a tensor, onto the CPU.
  Tensor Read(std::string_view name) const {
    dg_tensor* out = nullptr;
    Check(dg_safetensors_file_read(get(), Str(name), &out));
    return Tensor(out);
  }
  // Writes what the file has under that name to a tensor.
  void ReadInto(std::string_view name, const Tensor& tensor) const {
    Check(dg_safetensors_file_read_into(get(), Str(name), tensor.get()));
  }
  dg_safetensors_file* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_safetensors_file, dg_safetensors_file_destroy> handle_;
};

// Moves the gradients of all contexts into the first of them, on every worker: for accumulation.
inline void SumGradients(Worker& worker, const std::vector<ContextRef>& contexts) {
  std::vector<const dg_context*> handles;
  handles.reserve(contexts.size());
  for (const ContextRef& context : contexts) handles.push_back(context.get());
  Check(dg_worker_sum_gradients(worker.get(), handles.data(), handles.size()));
}

// --------------------------------------------------------------------------------- Optimizers

class Optimizer {
 public:
  Optimizer(Worker& worker, std::string_view name, const std::vector<Tensor>& parameters,
            const dg_sgd_options& options)
      : Optimizer(dg_optimizer_create_sgd, HandleOf(worker), name, parameters, options) {}
  // Without a worker it is a local one, for the step of a pipeline's stage.
  Optimizer(const std::vector<Tensor>& parameters, const dg_sgd_options& options)
      : Optimizer(dg_optimizer_create_sgd, nullptr, {}, parameters, options) {}
  static Optimizer Adam(Worker& worker, std::string_view name,
                        const std::vector<Tensor>& parameters,
                        const dg_adam_options& options = DG_ADAM_OPTIONS_INIT) {
    return Optimizer(dg_optimizer_create_adam, HandleOf(worker), name, parameters, options);
  }
  static Optimizer Adam(const std::vector<Tensor>& parameters,
                        const dg_adam_options& options = DG_ADAM_OPTIONS_INIT) {
    return Optimizer(dg_optimizer_create_adam, nullptr, {}, parameters, options);
  }
  static Optimizer AdamW(Worker& worker, std::string_view name,
                         const std::vector<Tensor>& parameters,
                         const dg_adam_options& options = DG_ADAMW_OPTIONS_INIT) {
    return Optimizer(dg_optimizer_create_adamw, HandleOf(worker), name, parameters, options);
  }
  static Optimizer AdamW(const std::vector<Tensor>& parameters,
                         const dg_adam_options& options = DG_ADAMW_OPTIONS_INIT) {
    return Optimizer(dg_optimizer_create_adamw, nullptr, {}, parameters, options);
  }
  // Names the workers that have parts, this one among them; without it all have.
  void SetWorkers(const std::vector<std::string>& workers) {
    std::vector<dg_str> names;
    for (const std::string& worker : workers) names.push_back(Str(worker));
    Check(dg_optimizer_set_workers(get(), names.data(), names.size()));
  }
  void Step(ContextRef context) { Check(dg_optimizer_step(get(), context.get())); }
  // Returns the norm before.
  double ClipGradients(ContextRef context, double max_norm) {
    double norm = 0;
    Check(dg_optimizer_clip_gradients(get(), context.get(), max_norm, &norm));
    return norm;
  }
  void SetLearningRate(double learning_rate) {
    Check(dg_optimizer_set_learning_rate(get(), learning_rate));
  }
  // Returns this worker's part, by the names of PyTorch's state_dict(): "state.2.exp_avg".
  std::vector<std::pair<std::string, Tensor>> State() const {
    using State = std::vector<std::pair<std::string, Tensor>>;
    struct Visit {
      State state;
      std::exception_ptr thrown;
    } visited;
    Check(dg_optimizer_state(
        get(),
        [](void* data, dg_str name, const dg_tensor* tensor) {
          Visit& visit = *static_cast<Visit*>(data);
          try {
            if (!visit.thrown) visit.state.emplace_back(View(name), Tensor::FromBorrowed(tensor));
          } catch (...) {
            visit.thrown = std::current_exception();
          }
        },
        &visited));
    if (visited.thrown) std::rethrow_exception(visited.thrown);
    return std::move(visited.state);
  }
  void LoadState(const std::vector<std::pair<std::string, Tensor>>& state) {
    std::vector<dg_str> names;
    std::vector<const dg_tensor*> tensors;
    for (const auto& [name, tensor] : state) {
      names.push_back(Str(name));
      tensors.push_back(tensor.get());
    }
    Check(dg_optimizer_load_state(get(), names.data(), tensors.data(), names.size()));
  }
  // Saves this worker's part to a file, by the names of its parameters, and loads it from one.
  void Save(const TensorMap& parameters, std::string_view path) const {
    const internal::NamedHandles named(parameters);
    Check(dg_optimizer_save(get(), named.names.data(), named.tensors.data(), named.names.size(),
                            Str(path)));
  }
  void Load(std::string_view path, const TensorMap& parameters) {
    const internal::NamedHandles named(parameters);
    Check(dg_optimizer_load(get(), named.names.data(), named.tensors.data(), named.names.size(),
                            Str(path)));
  }
  // Removes this worker's part: another one may then have its name.
  void Remove() { Check(dg_optimizer_remove(get())); }
  dg_optimizer* get() const noexcept { return handle_.get(); }

 private:
  // One that was moved from is none, with which the library would make a local optimizer.
  static dg_worker* HandleOf(const Worker& worker) {
    if (worker.get() != nullptr) return worker.get();
    throw Error(DG_INVALID_ARGUMENT, "worker is NULL, and has to be a valid dg_worker");
  }
  template <typename Function, typename Options>
  Optimizer(Function create, dg_worker* worker, std::string_view name,
            const std::vector<Tensor>& parameters, const Options& options) {
    const std::vector<const dg_tensor*> handles = internal::Handles(parameters);
    dg_optimizer* out = nullptr;
    Check(create(worker, Str(name), handles.data(), handles.size(), &options, &out));
    handle_ = Handle<dg_optimizer, dg_optimizer_destroy>(out);
  }
  Handle<dg_optimizer, dg_optimizer_destroy> handle_;
};

// ------------------------------------------------------------------------ Checkpoints of a job

// Small things that are no tensors, by name. Any bytes.
using CheckpointValues = std::map<std::string, std::string>;

// What load_values gets.
struct LoadedValues {
  int64_t step;
  CheckpointValues values;                          // of the worker of this name; else none
  std::map<std::string, CheckpointValues> workers;  // of all that saved, by their names
};

// What a worker has of a checkpoint.
struct CheckpointContents {
  TensorMap tensors = {};
  // Of the part's own worker, or local ones. The part keeps what it needs of them.
  std::map<std::string, const Optimizer*> optimizers = {};
  // On threads of the worker, as handlers. The error that they throw is that of the save or load.
  std::function<CheckpointValues()> save_values = nullptr;
  std::function<void(const LoadedValues&)> load_values = nullptr;
};

class CheckpointPart {
 public:
  CheckpointPart(Worker& worker, const CheckpointContents& contents, std::string_view name = {}) {
    const internal::NamedHandles tensors(contents.tensors);
    std::vector<dg_str> optimizer_names;
    std::vector<dg_optimizer*> optimizers;
    for (const auto& [optimizer_name, optimizer] : contents.optimizers) {
      optimizer_names.push_back(Str(optimizer_name));
      optimizers.push_back(optimizer == nullptr ? nullptr : optimizer->get());
    }
    dg_checkpoint_contents given = DG_CHECKPOINT_CONTENTS_INIT;
    given.tensor_names = tensors.names.data();
    given.tensors = tensors.tensors.data();
    given.tensor_count = tensors.names.size();
    given.optimizer_names = optimizer_names.data();
    given.optimizers = optimizers.data();
    given.optimizer_count = optimizers.size();
    if (contents.save_values) given.save_values = SaveValues;
    if (contents.load_values) given.load_values = LoadValues;
    dg_checkpoint_part* out = nullptr;
    Check(dg_checkpoint_part_create(
        worker.get(), Str(name), &given, new Functions{contents.save_values, contents.load_values},
        [](void* data) { delete static_cast<Functions*>(data); }, &out));
    handle_ = Handle<dg_checkpoint_part, dg_checkpoint_part_destroy>(out);
  }
  // Removes the part, which otherwise lasts as long as the worker.
  void Remove() { Check(dg_checkpoint_part_remove(get())); }
  dg_checkpoint_part* get() const noexcept { return handle_.get(); }

 private:
  struct Functions {
    std::function<CheckpointValues()> save_values;
    std::function<void(const LoadedValues&)> load_values;
  };
  static dg_error* SaveValues(void* data, dg_checkpoint_values* values) noexcept {
    return Catch([&] {
      for (const auto& [name, value] : static_cast<Functions*>(data)->save_values()) {
        Check(dg_checkpoint_values_set(values, Str(name), Str(value)));
      }
    });
  }
  static CheckpointValues ToValues(const dg_entry* entries, size_t count) {
    CheckpointValues values;
    for (size_t i = 0; i < count; ++i) {
      values.emplace(View(entries[i].name), View(entries[i].value));
    }
    return values;
  }
  static dg_error* LoadValues(void* data, const dg_loaded_values* loaded) noexcept {
    return Catch([&] {
      LoadedValues given{loaded->step, ToValues(loaded->values, loaded->value_count), {}};
      for (size_t i = 0; i < loaded->worker_count; ++i) {
        const dg_checkpoint_worker_values& worker = *loaded->workers[i];
        given.workers.emplace(View(worker.worker), ToValues(worker.values, worker.value_count));
      }
      static_cast<Functions*>(data)->load_values(given);
    });
  }
  Handle<dg_checkpoint_part, dg_checkpoint_part_destroy> handle_;
};

struct LoadedCheckpoint {
  // Takes `loaded`.
  explicit LoadedCheckpoint(dg_loaded_checkpoint* loaded) {
    const Handle<dg_loaded_checkpoint, dg_loaded_checkpoint_destroy> owner(loaded);
    step = dg_loaded_checkpoint_step(loaded);
    folder = View(dg_loaded_checkpoint_folder(loaded));
    missing = List(loaded, DG_LOADED_MISSING);
    unexpected = List(loaded, DG_LOADED_UNEXPECTED);
    mismatched = List(loaded, DG_LOADED_MISMATCHED);
  }

  int64_t step;
  std::string folder;
  // For people. All are empty without DG_CHECKPOINT_LOAD_NOT_STRICT.
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> mismatched;

 private:
  static std::vector<std::string> List(const dg_loaded_checkpoint* loaded, uint64_t list) {
    std::vector<std::string> items;
    for (size_t i = 0; i < dg_loaded_checkpoint_count(loaded, list); ++i) {
      items.emplace_back(View(dg_loaded_checkpoint_item(loaded, list, i)));
    }
    return items;
  }
};

class CheckpointManager {
 public:
  CheckpointManager(
      Worker& worker, std::string_view folder,
      const dg_checkpoint_manager_options& options = DG_CHECKPOINT_MANAGER_OPTIONS_INIT) {
    dg_checkpoint_manager* out = nullptr;
    Check(dg_checkpoint_manager_create(worker.get(), Str(folder), &options, &out));
    handle_ = Handle<dg_checkpoint_manager, dg_checkpoint_manager_destroy>(out);
  }
  void Save(int64_t step, int64_t timeout_ms = DG_FOREVER) {
    Check(dg_checkpoint_manager_save(get(), step, timeout_ms));
  }
  // The future is done when it is durable.
  Future SaveAsync(int64_t step, int64_t timeout_ms = DG_FOREVER) {
    dg_future* out = nullptr;
    Check(dg_checkpoint_manager_save_async(get(), step, timeout_ms, &out));
    return Future(out);
  }
  // DG_NOT_FOUND: there is none, so begin at step 0.
  LoadedCheckpoint Load(
      const dg_checkpoint_load_options& options = DG_CHECKPOINT_LOAD_OPTIONS_INIT) {
    dg_loaded_checkpoint* out = nullptr;
    Check(dg_checkpoint_manager_load(get(), &options, &out));
    return LoadedCheckpoint(out);
  }
  dg_checkpoint_manager* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_checkpoint_manager, dg_checkpoint_manager_destroy> handle_;
};

// Loads without a manager and its lock.
inline LoadedCheckpoint LoadCheckpoint(
    Worker& worker, std::string_view folder,
    const dg_checkpoint_load_options& options = DG_CHECKPOINT_LOAD_OPTIONS_INIT,
    const dg_checkpoint_manager_options& of = DG_CHECKPOINT_MANAGER_OPTIONS_INIT) {
  dg_loaded_checkpoint* out = nullptr;
  Check(dg_checkpoint_load(worker.get(), Str(folder), &options, &of, &out));
  return LoadedCheckpoint(out);
}

// --------------------------------------------------------------------------------- Pipelines

// What dg_schedule_data says.
struct ScheduleData {
  uint64_t micro_batches = 0;
  std::vector<uint32_t> rank_of_stage = {};        // by stage
  std::vector<std::vector<dg_action>> lists = {};  // by rank
  std::vector<uint32_t> max_activations = {};      // by rank; empty: nothing is promised
};

// When a schedule does what.
struct Timeline {
  double end = 0;                           // when the last rank is through
  std::vector<double> busy;                 // by rank
  std::vector<uint32_t> max_activations;    // by rank
  std::vector<std::vector<double>> starts;  // of each action of a list
};

class Schedule {
 public:
  // `flags`: DG_SCHEDULE_...
  explicit Schedule(const ScheduleData& data, uint64_t flags = 0) {
    std::vector<dg_action_list> lists;
    for (const std::vector<dg_action>& list : data.lists)
      lists.push_back({list.data(), list.size()});
    if (!data.max_activations.empty() && data.max_activations.size() != lists.size()) {
      throw Error(DG_INVALID_ARGUMENT, "max_activations has not one number for each rank");
    }
    dg_schedule_data of = DG_SCHEDULE_DATA_INIT;
    of.micro_batches = data.micro_batches;
    of.rank_of_stage = data.rank_of_stage.data();
    of.stage_count = data.rank_of_stage.size();
    of.lists = lists.data();
    of.rank_count = lists.size();
    of.max_activations = data.max_activations.empty() ? nullptr : data.max_activations.data();
    Create(dg_schedule_create, &of, flags);
  }
  static Schedule GPipe(uint64_t stages, uint64_t micro_batches) {
    return Make(dg_schedule_create_gpipe, stages, micro_batches);
  }
  static Schedule OneForwardOneBackward(uint64_t stages, uint64_t micro_batches) {
    return Make(dg_schedule_create_one_forward_one_backward, stages, micro_batches);
  }
  static Schedule InterleavedOneForwardOneBackward(uint64_t ranks, uint64_t stages_per_rank,
                                                   uint64_t micro_batches) {
    return Make(dg_schedule_create_interleaved_one_forward_one_backward, ranks, stages_per_rank,
                micro_batches);
  }
  // The first stage's backward stays whole.
  static Schedule ZeroBubbleH1(uint64_t stages, uint64_t micro_batches) {
    return Make(dg_schedule_create_zero_bubble_h1, stages, micro_batches);
  }
  // ZB-H1 with twice as many forwards ahead; for 2 (stages - 1) micro-batches or more.
  static Schedule ZeroBubbleH2(uint64_t stages, uint64_t micro_batches) {
    return Make(dg_schedule_create_zero_bubble_h2, stages, micro_batches);
  }
  // ZB-H1 has one forward ahead for each rank behind a rank, ZB-H2 two; more are for steps in
  // flight behind each other, over slow hand-overs.
  static Schedule ZeroBubble(uint64_t stages, uint64_t micro_batches, uint64_t forwards_ahead) {
    return Make(dg_schedule_create_zero_bubble, stages, micro_batches, forwards_ahead);
  }

  // The same with the optimizer's step of each stage behind the list of its rank.
  Schedule WithSteps() const { return Schedule(data(), DG_SCHEDULE_ADD_STEPS); }

  ScheduleData data() const {
    ScheduleData copy;
    const dg_schedule_data* const of = dg_schedule_get(get());
    if (of == nullptr) return copy;
    copy.micro_batches = of->micro_batches;
    copy.rank_of_stage.assign(of->rank_of_stage, of->rank_of_stage + of->stage_count);
    for (size_t rank = 0; rank < of->rank_count; ++rank) {
      const dg_action_list& list = of->lists[rank];
      copy.lists.emplace_back(list.data, list.data + list.size);
    }
    if (of->max_activations != nullptr) {
      copy.max_activations.assign(of->max_activations, of->max_activations + of->rank_count);
    }
    return copy;
  }
  // `time` says how long a dg_action takes.
  template <typename F>
  Timeline Simulate(F&& time) const {
    const ScheduleData of = data();
    Timeline timeline;
    timeline.busy.resize(of.lists.size());
    timeline.max_activations.resize(of.lists.size());
    std::vector<double*> starts;
    for (const std::vector<dg_action>& list : of.lists) timeline.starts.emplace_back(list.size());
    for (std::vector<double>& list : timeline.starts) starts.push_back(list.data());
    std::exception_ptr thrown;
    auto ask = [&](const dg_action& action) -> double {
      try {
        return thrown ? 0 : time(action);
      } catch (...) {
        thrown = std::current_exception();
        return 0;
      }
    };
    Check(dg_schedule_simulate(
        get(),
        [](void* data, const dg_action* action) {
          return (*static_cast<decltype(ask)*>(data))(*action);
        },
        &ask, &timeline.end, timeline.busy.data(), timeline.max_activations.data(), starts.data()));
    if (thrown) std::rethrow_exception(thrown);
    return timeline;
  }
  dg_schedule* get() const noexcept { return handle_.get(); }

 private:
  Schedule() = default;
  template <typename Function, typename... Arguments>
  void Create(Function create, Arguments... arguments) {
    dg_schedule* out = nullptr;
    Check(create(arguments..., &out));
    handle_ = Handle<dg_schedule, dg_schedule_destroy>(out);
  }
  template <typename Function, typename... Arguments>
  static Schedule Make(Function create, Arguments... arguments) {
    Schedule schedule;
    schedule.Create(create, arguments...);
    return schedule;
  }
  Handle<dg_schedule, dg_schedule_destroy> handle_;
};

// The functions of a stage. They may throw. Forward and loss run in torch's modes of the thread
// that called Pipeline::Train, step and on_action in those of a new thread: see dg_pipeline_stage.
struct PipelineStage {
  std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)> forward = nullptr;
  std::function<Tensor(const std::vector<Tensor>& outputs, const std::vector<Tensor>& targets)>
      loss = nullptr;
  std::function<void(ContextRef context)> step = nullptr;
  int64_t inputs = 1;  // DG_ANY_COUNT: any number
  int64_t targets = 1;
  bool recompute = false;
  TensorMap tied = {};               // see dg_pipeline_stage
  std::vector<uint64_t> skips = {};  // see there, too
  std::function<void(const dg_stage_span& span)> on_action = nullptr;
};

// The stages of a pipeline that a worker has, by their number, until its end or that of the worker.
// With an averager in the options, a step fails with DG_FAILED_PRECONDITION for a gradient of a
// parameter that it leaves out; frozen parameters need none.
class PipelineStages {
 public:
  PipelineStages(Worker& worker, std::string_view name, std::map<uint64_t, PipelineStage> stages,
                 const dg_pipeline_stages_options& options = DG_PIPELINE_STAGES_OPTIONS_INIT) {
    std::vector<dg_pipeline_stage> list;
    std::vector<const dg_pipeline_stage*> pointers;
    std::vector<std::unique_ptr<PipelineStage>> owners;
    std::vector<internal::NamedHandles> tied;
    tied.reserve(stages.size());
    list.reserve(stages.size());
    for (auto& [number, stage] : stages) {
      dg_pipeline_stage& made = list.emplace_back(dg_pipeline_stage DG_PIPELINE_STAGE_INIT);
      made.number = number;
      if (stage.forward) made.forward = Forward;
      if (stage.loss) made.loss = Loss;
      if (stage.step) made.step = Step;
      if (stage.on_action) made.on_action = OnAction;
      made.inputs = stage.inputs;
      made.targets = stage.targets;
      made.flags = stage.recompute ? DG_PIPELINE_STAGE_RECOMPUTE : 0;
      made.destroy = [](void* data) { delete static_cast<PipelineStage*>(data); };
      owners.push_back(std::make_unique<PipelineStage>(std::move(stage)));
      const internal::NamedHandles& named = tied.emplace_back(owners.back()->tied);
      made.tied_names = named.names.data();
      made.tied = named.tensors.data();
      made.tied_count = named.names.size();
      made.skips = owners.back()->skips.data();
      made.skip_count = owners.back()->skips.size();
      pointers.push_back(&made);
    }
    for (size_t i = 0; i < list.size(); ++i) list[i].user_data = owners[i].release();
    dg_pipeline_stages* out = nullptr;
    Check(dg_pipeline_stages_create(worker.get(), Str(name), pointers.data(), pointers.size(),
                                    &options, &out));
    handle_ = Handle<dg_pipeline_stages, dg_pipeline_stages_destroy>(out);
  }
  dg_pipeline_stages* get() const noexcept { return handle_.get(); }

 private:
  static std::vector<Tensor> Borrowed(const dg_tensor* const* handles, size_t count) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < count; ++i) tensors.push_back(Tensor::FromBorrowed(handles[i]));
    return tensors;
  }
  static dg_error* Forward(void* data, const dg_micro_batch* batch, dg_message** outputs) noexcept {
    return Catch([&] {
      const auto& stage = *static_cast<const PipelineStage*>(data);
      *outputs = Message({}, stage.forward(Borrowed(batch->inputs, batch->input_count))).release();
    });
  }
  static dg_error* Loss(void* data, const dg_micro_batch* batch, dg_tensor** loss) noexcept {
    return Catch([&] {
      const auto& stage = *static_cast<const PipelineStage*>(data);
      *loss = stage
                  .loss(Borrowed(batch->outputs, batch->output_count),
                        Borrowed(batch->targets, batch->target_count))
                  .release();
    });
  }
  static dg_error* Step(void* data, const dg_context* context) noexcept {
    return Catch([&] { static_cast<const PipelineStage*>(data)->step(ContextRef(context)); });
  }
  static dg_error* OnAction(void* data, const dg_stage_span* span) noexcept {
    return Catch([&] { static_cast<const PipelineStage*>(data)->on_action(*span); });
  }
  Handle<dg_pipeline_stages, dg_pipeline_stages_destroy> handle_;
};

// What a batch has given.
struct PipelineResult {
  std::vector<Tensor> losses;                // by micro-batch
  Tensor loss;                               // of the batch; null where there are no losses
  std::vector<std::vector<Tensor>> outputs;  // by micro-batch; of an evaluation alone
};

namespace internal {
inline PipelineResult TakeResult(dg_pipeline_result* handle) {
  const Handle<dg_pipeline_result, dg_pipeline_result_destroy> owner(handle);
  const auto tensors_of = [](const Message& message) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < message.tensor_count(); ++i) tensors.push_back(message.tensor(i));
    return tensors;
  };
  PipelineResult result;
  dg_message* message = nullptr;
  Check(dg_pipeline_result_losses(handle, &message));
  result.losses = tensors_of(Message(message));
  dg_tensor* loss = nullptr;
  Check(dg_pipeline_result_loss(handle, &loss));
  result.loss = Tensor(loss);
  for (size_t i = 0; i < dg_pipeline_result_output_count(handle); ++i) {
    Check(dg_pipeline_result_outputs(handle, i, &message));
    result.outputs.push_back(tensors_of(Message(message)));
  }
  return result;
}
}  // namespace internal

// A step that was started. Its destructor ends one that nobody has waited for. The pipeline may end
// before it, and so may its context, with which its gradients end.
class PipelineStep {
 public:
  explicit PipelineStep(dg_pipeline_step* handle) noexcept : handle_(handle) {}
  // Waits for its end. Once.
  PipelineResult Wait() {
    dg_pipeline_result* out = nullptr;
    Check(dg_pipeline_step_wait(get(), &out));
    return internal::TakeResult(out);
  }
  dg_pipeline_step* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_pipeline_step, dg_pipeline_step_destroy> handle_;
};

class Pipeline {
 public:
  // `workers`: that of each rank of the schedule.
  Pipeline(Worker& worker, std::string_view name, const Schedule& schedule,
           const std::vector<std::string>& workers,
           const dg_pipeline_options& options = DG_PIPELINE_OPTIONS_INIT) {
    const std::vector<dg_str> names = internal::Strs(workers);
    dg_pipeline* out = nullptr;
    Check(dg_pipeline_create(worker.get(), Str(name), schedule.get(), names.data(), names.size(),
                             &options, &out));
    handle_ = Handle<dg_pipeline, dg_pipeline_destroy>(out);
  }
  PipelineResult Train(
      ContextRef context, const std::vector<Tensor>& inputs, const std::vector<Tensor>& targets,
      const dg_pipeline_run_options& options = DG_PIPELINE_RUN_OPTIONS_INIT) const {
    const std::vector<const dg_tensor*> given = internal::Handles(inputs),
                                        wanted = internal::Handles(targets);
    dg_pipeline_result* out = nullptr;
    Check(dg_pipeline_train(get(), context.get(), given.data(), given.size(), wanted.data(),
                            wanted.size(), &options, &out));
    return internal::TakeResult(out);
  }
  // Starts a step behind those that run, and does not wait for its end. The tensors are not copied,
  // and must not be written to before that.
  PipelineStep Start(ContextRef context, const std::vector<Tensor>& inputs,
                     const std::vector<Tensor>& targets,
                     const dg_pipeline_run_options& options = DG_PIPELINE_RUN_OPTIONS_INIT) const {
    const std::vector<const dg_tensor*> given = internal::Handles(inputs),
                                        wanted = internal::Handles(targets);
    dg_pipeline_step* out = nullptr;
    Check(dg_pipeline_start(get(), context.get(), given.data(), given.size(), wanted.data(),
                            wanted.size(), &options, &out));
    return PipelineStep(out);
  }
  PipelineResult Evaluate(
      const std::vector<Tensor>& inputs, const std::vector<Tensor>& targets = {},
      const dg_pipeline_run_options& options = DG_PIPELINE_RUN_OPTIONS_INIT) const {
    const std::vector<const dg_tensor*> given = internal::Handles(inputs),
                                        wanted = internal::Handles(targets);
    dg_pipeline_result* out = nullptr;
    Check(dg_pipeline_evaluate(get(), given.data(), given.size(), wanted.data(), wanted.size(),
                               &options, &out));
    return internal::TakeResult(out);
  }
  dg_pipeline* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_pipeline, dg_pipeline_destroy> handle_;
};

// ------------------------------------------------------------------------------ Data parallel

// What the function of a DataParallel gets for one replica; borrowed for the call.
class Replica {
 public:
  explicit Replica(const dg_replica* replica) noexcept : replica_(replica) {}
  size_t index() const noexcept { return static_cast<size_t>(replica_->index); }
  std::string_view device() const noexcept { return View(replica_->device); }
  std::vector<Tensor> parameters() const {
    return Tensors(replica_->parameters, replica_->parameter_count);
  }
  std::vector<Tensor> buffers() const { return Tensors(replica_->buffers, replica_->buffer_count); }
  std::vector<Tensor> inputs() const { return Tensors(replica_->inputs, replica_->input_count); }
  const dg_replica& get() const noexcept { return *replica_; }

 private:
  static std::vector<Tensor> Tensors(const dg_tensor* const* handles, size_t count) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < count; ++i) tensors.push_back(Tensor::FromBorrowed(handles[i]));
    return tensors;
  }
  const dg_replica* replica_;
};

namespace internal {
// Owns the handles that a C function stored.
inline std::vector<Tensor> Own(const std::vector<dg_tensor*>& handles) {
  std::vector<Tensor> tensors;
  for (dg_tensor* handle : handles) tensors.emplace_back(handle);
  return tensors;
}
}  // namespace internal

class DataParallel {
 public:
  // Returns as many outputs as Forward() asks for.
  using Function = std::function<std::vector<Tensor>(const Replica&)>;

  DataParallel(const std::vector<Tensor>& parameters, const dg_data_parallel_options& options,
               Function function) {
    const std::vector<const dg_tensor*> handles = internal::Handles(parameters);
    dg_data_parallel* out = nullptr;
    Check(dg_data_parallel_create(
        handles.data(), handles.size(), &options, Run, new Function(std::move(function)),
        [](void* data) { delete static_cast<Function*>(data); }, &out));
    handle_ = Handle<dg_data_parallel, dg_data_parallel_destroy>(out);
  }
  std::vector<Tensor> Forward(const std::vector<Tensor>& inputs, size_t output_count = 1) const {
    const std::vector<const dg_tensor*> handles = internal::Handles(inputs);
    std::vector<dg_tensor*> outs(output_count);
    Check(
        dg_data_parallel_forward(get(), handles.data(), handles.size(), outs.data(), outs.size()));
    return internal::Own(outs);
  }
  dg_data_parallel* get() const noexcept { return handle_.get(); }

 private:
  static dg_error* Run(void* data, const dg_replica* replica, dg_tensor** outputs) noexcept {
    return Catch([&] {
      std::vector<Tensor> made = (*static_cast<Function*>(data))(Replica(replica));
      if (made.size() != replica->output_count) {
        throw Error(DG_INVALID_ARGUMENT, "the function gave another number of outputs");
      }
      for (Tensor& output : made) *outputs++ = output.release();
    });
  }
  Handle<dg_data_parallel, dg_data_parallel_destroy> handle_;
};

// Returns at most one part for each device; `sizes` may be empty.
inline std::vector<Tensor> Scatter(const Tensor& tensor, const std::vector<std::string>& devices,
                                   int64_t dim = 0, const std::vector<int64_t>& sizes = {}) {
  if (!sizes.empty() && sizes.size() != devices.size()) {
    throw Error(DG_INVALID_ARGUMENT, "there is not one size for each device");
  }
  const std::vector<dg_str> names = internal::Strs(devices);
  std::vector<dg_tensor*> outs(devices.size());
  size_t count = 0;
  Check(dg_scatter(tensor.get(), names.data(), names.size(), dim,
                   sizes.empty() ? nullptr : sizes.data(), outs.data(), &count));
  outs.resize(count);
  return internal::Own(outs);
}
inline Tensor Gather(const std::vector<Tensor>& tensors, std::string_view device = {},
                     int64_t dim = 0) {
  const std::vector<const dg_tensor*> handles = internal::Handles(tensors);
  dg_tensor* out = nullptr;
  Check(dg_gather(handles.data(), handles.size(), Str(device), dim, &out));
  return Tensor(out);
}
// Returns the copies by device, then by tensor.
inline std::vector<std::vector<Tensor>> Broadcast(const std::vector<Tensor>& tensors,
                                                  const std::vector<std::string>& devices) {
  const std::vector<const dg_tensor*> handles = internal::Handles(tensors);
  const std::vector<dg_str> names = internal::Strs(devices);
  std::vector<dg_tensor*> outs(tensors.size() * devices.size());
  Check(dg_broadcast(handles.data(), handles.size(), names.data(), names.size(), outs.data()));
  std::vector<std::vector<Tensor>> copies(devices.size());
  for (size_t i = 0; i < outs.size(); ++i) copies[i / tensors.size()].emplace_back(outs[i]);
  return copies;
}
// Adds up lists, which have to be of one length.
inline std::vector<Tensor> ReduceAdd(const std::vector<std::vector<Tensor>>& lists,
                                     std::string_view device = {}) {
  const size_t length = lists.empty() ? 0 : lists[0].size();
  std::vector<const dg_tensor*> handles;
  for (const std::vector<Tensor>& list : lists) {
    if (list.size() != length) throw Error(DG_INVALID_ARGUMENT, "lists of different lengths");
    for (const Tensor& tensor : list) handles.push_back(tensor.get());
  }
  std::vector<dg_tensor*> outs(length);
  Check(dg_reduce_add(handles.data(), lists.size(), length, Str(device), outs.data()));
  return internal::Own(outs);
}

// ----------------------------------------------------------------------------- Process groups

class ProcessGroup {
 public:
  explicit ProcessGroup(Worker& worker,
                        const dg_process_group_options& options = DG_PROCESS_GROUP_OPTIONS_INIT) {
    dg_process_group* out = nullptr;
    Check(dg_process_group_create(worker.get(), &options, &out));
    handle_ = Handle<dg_process_group, dg_process_group_destroy>(out);
  }
  uint32_t rank() const noexcept { return dg_process_group_rank(get()); }
  uint32_t size() const noexcept { return dg_process_group_size(get()); }
  // Averages in place.
  void Average(const std::vector<Tensor>& tensors) {
    const std::vector<const dg_tensor*> handles = internal::Handles(tensors);
    Check(dg_process_group_average(get(), handles.data(), handles.size()));
  }
  void Broadcast(const std::vector<Tensor>& tensors, uint32_t root = 0) {
    const std::vector<const dg_tensor*> handles = internal::Handles(tensors);
    Check(dg_process_group_broadcast(get(), handles.data(), handles.size(), root));
  }
  // Tells the other ranks that this one cannot go on, and why.
  void Fail(dg_code code, std::string_view why) {
    Check(dg_process_group_fail(get(), code, Str(why)));
  }
  dg_process_group* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_process_group, dg_process_group_destroy> handle_;
};

class GradientAverager {
 public:
  // Parameters that do not require grad now are left out of all averages; once one of them requires
  // grad averages fail on every rank, with an error that names it.
  GradientAverager(
      ProcessGroup& group, const std::vector<Tensor>& parameters,
      const dg_gradient_averager_options& options = DG_GRADIENT_AVERAGER_OPTIONS_INIT) {
    const std::vector<const dg_tensor*> handles = internal::Handles(parameters);
    dg_gradient_averager* out = nullptr;
    Check(dg_gradient_averager_create(group.get(), handles.data(), handles.size(), &options, &out));
    handle_ = Handle<dg_gradient_averager, dg_gradient_averager_destroy>(out);
  }
  void Average(ContextRef context) { Check(dg_gradient_averager_average(get(), context.get())); }
  // Makes the averages begin during the backward of the context; call it before, and Average()
  // after that.
  void AverageInBackward(ContextRef context) {
    Check(dg_gradient_averager_average_in_backward(get(), context.get()));
  }
  // Takes part in the others' next average, for a rank that has run out of data; false when all
  // have. `flags`: DG_GRADIENT_AVERAGER_JOIN_...
  bool Join(ContextRef context, uint64_t flags = 0) {
    bool others_go_on = false;
    Check(dg_gradient_averager_join(get(), context.get(), flags, &others_go_on));
    return others_go_on;
  }
  dg_gradient_averager* get() const noexcept { return handle_.get(); }

 private:
  Handle<dg_gradient_averager, dg_gradient_averager_destroy> handle_;
};

}  // namespace dg

#endif  // DISTGRAD_DISTGRAD_HPP_
