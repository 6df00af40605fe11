/* clang-format off */
/* distgrad: distributed autograd over RPC.
 *
 * This header is the whole public interface. It is C99 and includes nothing of torch; the library
 * behind it may change freely as long as this file does not. docs/abi.md has the promise and the
 * reasons.
 *
 *   Handles    are opaque, and checked at each use. NULL, a handle of another kind and a destroyed
 *              one give DG_INVALID_ARGUMENT with the name of the parameter; a function that returns
 *              no error then returns the value that its comment names, or else 0, false or an empty
 *              string. Handles are not addresses: never dereference one. A function that stores a
 *              handle in a `T **out` parameter makes the caller its owner, who destroys it with one
 *              dg_T_destroy; that accepts NULL and cannot fail.
 *              That ends what the handle stands for, but for the parts that other workers use by
 *              name and that hold nothing but tensors (dg_optimizer, dg_checkpoint_part): these
 *              last until their _remove, or as long as the worker.
 *   Arguments  are borrowed until the function returns, unless its comment says "takes": then the
 *              library owns them from that moment on, also when the function fails.
 *   Errors     are returned. NULL means success; otherwise the caller owns the error, and every
 *              `out` parameter was left as it was. Invalid arguments are DG_INVALID_ARGUMENT
 *              everywhere; comments name the other codes to expect.
 *   Threads    Any function may be called on any thread at any time, unless its comment says
 *              otherwise. Some functions write to the caller's tensors, which no other thread may
 *              use meanwhile: dg_op_call with an operator that writes to its arguments,
 *              dg_tensor_require_grad, a step of an optimizer (its parameters), an average and a
 *              broadcast of a process group, an averager (parameters and buffers), a forward of
 *              data parallel (buffers), dg_safetensors_load_into, dg_safetensors_file_read_into,
 *              and dg_checkpoint_manager_load and dg_checkpoint_load (the tensors of all parts).
 *   Forks      A forked child has none of its parent's handles: functions return
 *              DG_INVALID_ARGUMENT for them, dg_T_destroy does nothing, and nothing waits. What
 *              the child creates itself works as far as libtorch does there.
 *   Waiting    Functions marked "Waits" may be called by handlers, but return
 *              DG_FAILED_PRECONDITION in the callback of a future or a cancellation and in
 *              destructors of user data, where they could wait for ever for their own thread.
 *   Callbacks  run with no lock held. `user_data` is destroyed exactly once, by the destructor
 *              given with it (NULL: none), after the last call, on any thread.
 *   Options    begin with `struct_size`: start from the DG_..._INIT macro. NULL means all default.
 *              Fields are only ever added at the end.
 *   Structs    have no padding, so that all their bytes are what a program or the library has set:
 *              a number that stands alone has 64 bits there also if it needs fewer (a rank, a
 *              kind).
 *   Times      are in milliseconds from now. DG_FOREVER: no limit. 0 as an argument is no time at
 *              all; in options, the default.
 */
/* clang-format on */
#ifndef DISTGRAD_DISTGRAD_H_
#define DISTGRAD_DISTGRAD_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define DG_API __attribute__((visibility("default")))
#define DG_MUST_USE __attribute__((warn_unused_result))
#else
#define DG_API
#define DG_MUST_USE
#endif

#ifdef __cplusplus
#define DG_NOEXCEPT noexcept
extern "C" {
#else
#define DG_NOEXCEPT
#endif

/* ----------------------------------------------------------------------------------- Version */

/* MAJOR changes when a program built against an older header may break; it is also the number in
 * the library's soname. MINOR counts additions. */
#define DG_ABI_MAJOR 1
#define DG_ABI_MINOR 0

/* Returns the version that the loaded library implements: MAJOR << 16 | MINOR. */
DG_API uint32_t dg_abi_version(void) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------------- Strings */

/* A borrowed UTF-8 string; not NUL-terminated. */
typedef struct dg_str {
  const char* data;
  size_t size;
} dg_str;

/* The dg_str of a string literal. */
#ifdef __cplusplus
#define DG_STR(literal) \
  dg_str { "" literal, sizeof(literal) - 1 }
#else
#define DG_STR(literal) ((dg_str){"" literal, sizeof(literal) - 1})
#endif

/* Returns the version of the libtorch that the library was built with: "2.11.0". */
DG_API dg_str dg_torch_version(void) DG_NOEXCEPT;

/* ------------------------------------------------------------------------------------ Errors */

typedef struct dg_error dg_error;

/* The canonical codes of absl::StatusCode and gRPC, number for number. */
typedef int32_t dg_code;
enum {
  DG_OK = 0,
  DG_CANCELLED = 1,
  DG_UNKNOWN = 2,
  DG_INVALID_ARGUMENT = 3,
  DG_DEADLINE_EXCEEDED = 4,
  DG_NOT_FOUND = 5,
  DG_ALREADY_EXISTS = 6,
  DG_PERMISSION_DENIED = 7,
  DG_RESOURCE_EXHAUSTED = 8,
  DG_FAILED_PRECONDITION = 9,
  DG_ABORTED = 10,
  DG_OUT_OF_RANGE = 11,
  DG_UNIMPLEMENTED = 12,
  DG_INTERNAL = 13,
  DG_UNAVAILABLE = 14,
  DG_DATA_LOSS = 15,
  DG_UNAUTHENTICATED = 16
};

/* Creates an error, for a callback to return. Never returns NULL. DG_OK, and a code that is none
 * of the above, become DG_UNKNOWN. */
DG_API dg_error* dg_error_create(dg_code code, dg_str message) DG_NOEXCEPT;
DG_API void dg_error_destroy(dg_error* error) DG_NOEXCEPT;
/* Returns DG_OK for NULL. */
DG_API dg_code dg_error_code(const dg_error* error) DG_NOEXCEPT;
/* Returns a text for people, not for programs to parse. It lives as long as `error`. */
DG_API dg_str dg_error_message(const dg_error* error) DG_NOEXCEPT;

/* Returns what gave the error (DG_ORIGIN_...), and stores the rank of the worker on which it
 * arose (unless `rank` is NULL); stores nothing if that is not known (DG_ORIGIN_NONE). An error
 * keeps its origin on its way through nested calls, as long as each handler returns the dg_error
 * that it got. An origin is what the peers say, not a proof. */
DG_API uint32_t dg_error_origin(const dg_error* error, uint32_t* rank) DG_NOEXCEPT;
enum {
  DG_ORIGIN_NONE = 0,     /* not known: it arose on no worker, or dg_error_create made it */
  DG_ORIGIN_DISTGRAD = 1, /* distgrad, or an operator or optimizer of torch that it ran */
  DG_ORIGIN_HANDLER = 2   /* a handler returned it */
};
/* Creates an error with an origin: for a callback that returns an error whose dg_error it no
 * longer has, as in languages whose errors are values. An unknown origin, or a rank beyond
 * 65535, gives an error without origin. */
DG_API dg_error* dg_error_create_with_origin(dg_code code, dg_str message, uint32_t origin,
                                             uint32_t rank) DG_NOEXCEPT;

/* Reports to the launcher why this process fails, if the launcher asks for that: torchrun's
 * summary then has code and message. Codes as for dg_error_create. Only the first report of a
 * process counts. An error if the report cannot be written. docs/launching.md, "torchrun". */
DG_API DG_MUST_USE dg_error* dg_report_failure(dg_code code, dg_str message) DG_NOEXCEPT;

/* --------------------------------------------------------------------------------------- Log */

enum { DG_LOG_INFO = 0, DG_LOG_WARNING = 1, DG_LOG_ERROR = 2 };
/* Passes the lines that the library logs to `sink`, instead of writing them to standard error; NULL
 * restores standard error. `severity` is DG_LOG_...; `text` has neither time nor newline, and is
 * borrowed. Which lines are logged is up to the environment variable DISTGRAD_LOG (INFO, WARNING,
 * ERROR or OFF; WARNING when it is not set). The process has one sink, and a new one replaces the
 * former. Takes `user_data`.
 *
 * The sink is called on any thread, on several at once, also on the network's, and while the
 * library holds locks of its own: it must neither wait nor call a function of this library. When
 * this function has returned, the former sink does not run and is not called again, and its
 * user_data is destroyed. Waits for that, also where other functions that wait are refused, but
 * not if it is called in a sink. */
DG_API DG_MUST_USE dg_error* dg_log_set_sink(void (*sink)(void* user_data, uint32_t severity,
                                                          dg_str text),
                                             void* user_data,
                                             void (*destroy)(void* user_data)) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------------- Tensors */

/* A reference to a torch tensor. Two handles may refer to the same tensor. */
typedef struct dg_tensor dg_tensor;

/* torch's numbers (c10::ScalarType). For operators a dtype is an integer. */
typedef int32_t dg_dtype;
enum {
  DG_UINT8 = 0,
  DG_INT8 = 1,
  DG_INT16 = 2,
  DG_INT32 = 3,
  DG_INT64 = 4,
  DG_FLOAT16 = 5,
  DG_FLOAT32 = 6,
  DG_FLOAT64 = 7,
  DG_COMPLEX32 = 8,
  DG_COMPLEX64 = 9,
  DG_COMPLEX128 = 10,
  DG_BOOL = 11,
  DG_BFLOAT16 = 15,
  DG_FLOAT8_E5M2 = 23,
  DG_FLOAT8_E4M3FN = 24,
  DG_UINT16 = 27,
  DG_UINT32 = 28,
  DG_UINT64 = 29
};

/* Creates a tensor on the CPU with a copy of the elements at `data`, in row-major order.
 * DG_INVALID_ARGUMENT for a dtype that is none of the above, and for a negative or too large
 * shape; DG_RESOURCE_EXHAUSTED if memory is out. */
DG_API DG_MUST_USE dg_error* dg_tensor_from_data(const void* data, dg_dtype dtype,
                                                 const int64_t* shape, size_t dim_count,
                                                 dg_tensor** out) DG_NOEXCEPT;

/* Creates a tensor on the CPU over the caller's memory, which must stay valid until `destroy` is
 * called: when the last reference to the tensor's storage is gone. `strides` counts elements;
 * NULL: row-major. Takes `user_data`. Errors as of dg_tensor_from_data. */
DG_API DG_MUST_USE dg_error* dg_tensor_from_memory(void* data, dg_dtype dtype, const int64_t* shape,
                                                   const int64_t* strides, size_t dim_count,
                                                   void* user_data,
                                                   void (*destroy)(void* user_data),
                                                   dg_tensor** out) DG_NOEXCEPT;

struct DLManagedTensorVersioned; /* dlpack/dlpack.h, version 1.x */

/* Imports a tensor in the CPU's memory without a copy. Takes `managed`: its deleter runs when
 * the last reference is gone. DG_FAILED_PRECONDITION if it is marked read-only, for operators
 * could write to it; DG_UNIMPLEMENTED for another major version of DLPack, or another device;
 * DG_INVALID_ARGUMENT for a dtype that torch lacks, and for elements at NULL. */
DG_API DG_MUST_USE dg_error* dg_tensor_from_dlpack(struct DLManagedTensorVersioned* managed,
                                                   dg_tensor** out) DG_NOEXCEPT;

/* Exports a tensor in the CPU's memory without a copy. The caller owns *out, and calls its
 * deleter to end it. DG_FAILED_PRECONDITION if the tensor requires grad (detach it first), or if
 * dg_tensor_data cannot give its memory. */
DG_API DG_MUST_USE dg_error* dg_tensor_to_dlpack(const dg_tensor* tensor,
                                                 struct DLManagedTensorVersioned** out) DG_NOEXCEPT;

/* For programs that link the same libtorch. dg_tensor_torch returns the `at::Tensor *` of a
 * handle, which lives as long as the handle; NULL if `tensor` is not a valid handle.
 * dg_tensor_from_torch creates a handle for a `const at::Tensor *`. Both sides share autograd
 * history and memory. */
DG_API void* dg_tensor_torch(const dg_tensor* tensor) DG_NOEXCEPT;
DG_API DG_MUST_USE dg_error* dg_tensor_from_torch(const void* torch_tensor,
                                                  dg_tensor** out) DG_NOEXCEPT;

/* Creates one more handle of the same tensor. */
DG_API DG_MUST_USE dg_error* dg_tensor_clone(const dg_tensor* tensor, dg_tensor** out) DG_NOEXCEPT;
/* Creates a tensor with the same memory and no autograd history: nothing that is computed from
 * it is recorded. */
DG_API DG_MUST_USE dg_error* dg_tensor_detach(const dg_tensor* tensor, dg_tensor** out) DG_NOEXCEPT;
DG_API void dg_tensor_destroy(dg_tensor* tensor) DG_NOEXCEPT;

/* Returns -1 if `tensor` is not a valid handle. */
DG_API dg_dtype dg_tensor_dtype(const dg_tensor* tensor) DG_NOEXCEPT;
DG_API size_t dg_tensor_dim_count(const dg_tensor* tensor) DG_NOEXCEPT;
/* Stores the number of dimensions, and copies their sizes to `shape` and their strides, in
 * elements, to `strides`: arrays with room for `capacity` numbers each; NULL skips one. A dimension
 * along which the parts of a nested tensor differ has size -1. DG_OUT_OF_RANGE if there are
 * more, with *dim_count stored; DG_FAILED_PRECONDITION if strides are wanted and there
 * are none (sparse, nested). */
DG_API DG_MUST_USE dg_error* dg_tensor_layout(const dg_tensor* tensor, int64_t* shape,
                                              int64_t* strides, size_t capacity,
                                              size_t* dim_count) DG_NOEXCEPT;
DG_API int64_t dg_tensor_element_count(const dg_tensor* tensor) DG_NOEXCEPT;
/* Returns "cpu", "cuda:1"; the string lives for ever. Empty if `tensor` is not a valid handle. */
DG_API dg_str dg_tensor_device(const dg_tensor* tensor) DG_NOEXCEPT;

/* Stores the address of the first element; the others are at the strides of dg_tensor_layout. It
 * is valid as long as the handle, or until an operator gives the tensor other memory in place.
 * Do not write to it while an operator uses the tensor or a call sends it.
 * DG_FAILED_PRECONDITION if the memory does not hold the elements as they are (sparse, nested,
 * conjugate views), is too small for them, or is not the CPU's. */
DG_API DG_MUST_USE dg_error* dg_tensor_data(const dg_tensor* tensor, void** out) DG_NOEXCEPT;

DG_API bool dg_tensor_requires_grad(const dg_tensor* tensor) DG_NOEXCEPT;
/* Makes a leaf require grad (torch's requires_grad_). No other thread may use the tensor
 * meanwhile, by this handle or another. DG_FAILED_PRECONDITION if it is not a leaf,
 * DG_INVALID_ARGUMENT if its dtype is neither floating nor complex. */
DG_API DG_MUST_USE dg_error* dg_tensor_require_grad(dg_tensor* tensor) DG_NOEXCEPT;

/* Sets whether operators on this thread are recorded for backward (true at first), and returns
 * the mode before. A handler starts with the mode of its caller. */
DG_API bool dg_grad_set_enabled(bool enabled) DG_NOEXCEPT;
/* Returns whether operators on this thread are recorded for backward. */
DG_API bool dg_grad_enabled(void) DG_NOEXCEPT;

/* Seeds torch's random number generators, of all devices of this process: operators on one
 * thread give the same numbers after the same seed. */
DG_API DG_MUST_USE dg_error* dg_manual_seed(uint64_t seed) DG_NOEXCEPT;

/* Sets how many threads one operator on the CPU may use, on this thread and on threads that have
 * not run an operator yet: so call it first. Where torch parallelizes by OpenMP (as its releases
 * do), each thread that runs operators has so many of them. DG_INVALID_ARGUMENT for 0, and for
 * more than 1024. */
DG_API DG_MUST_USE dg_error* dg_set_num_threads(uint32_t count) DG_NOEXCEPT;
/* Returns how many threads one operator on this thread may use. Torch's default: one for each
 * core, or OMP_NUM_THREADS. */
DG_API uint32_t dg_num_threads(void) DG_NOEXCEPT;

/* ------------------------------------------------------------------------------------ Values */

/* An argument or a result of an operator; `kind` says which member of `as` is set. A dtype, layout
 * or memory format is an integer, a device a string. */
typedef struct dg_value {
  uint64_t kind;
  union {
    int64_t integer;
    double real;
    struct dg_complex {
      double real, imaginary;
    } complex;
    dg_str string;
    const dg_tensor* tensor;
    struct dg_integers {
      const int64_t* data;
      size_t size;
    } integers;
    struct dg_reals {
      const double* data;
      size_t size;
    } reals;
    struct dg_bools {
      const uint8_t* data;
      size_t size;
    } bools;
    struct dg_tensors {
      const dg_tensor* const* data;
      size_t size;
    } tensors;
  } as;
} dg_value;
enum {
  DG_VALUE_NONE = 0,
  DG_VALUE_INTEGER = 1,
  DG_VALUE_REAL = 2,
  DG_VALUE_BOOL = 3, /* as.integer: 0 or 1 */
  DG_VALUE_COMPLEX = 4,
  DG_VALUE_STRING = 5,
  DG_VALUE_TENSOR = 6, /* NULL: no tensor, as DG_VALUE_NONE */
  DG_VALUE_INTEGERS = 7,
  DG_VALUE_REALS = 8,
  DG_VALUE_BOOLS = 9,   /* each 0 or 1 */
  DG_VALUE_TENSORS = 10 /* NULL in a list of optional tensors: no tensor */
};

static inline dg_value dg_value_none(void) {
  dg_value value;
  value.kind = DG_VALUE_NONE;
  value.as.integer = 0;
  return value;
}
static inline dg_value dg_value_integer(int64_t integer) {
  dg_value value;
  value.kind = DG_VALUE_INTEGER;
  value.as.integer = integer;
  return value;
}
static inline dg_value dg_value_real(double real) {
  dg_value value;
  value.kind = DG_VALUE_REAL;
  value.as.real = real;
  return value;
}
static inline dg_value dg_value_bool(bool boolean) {
  dg_value value;
  value.kind = DG_VALUE_BOOL;
  value.as.integer = boolean ? 1 : 0;
  return value;
}
static inline dg_value dg_value_complex(double real, double imaginary) {
  dg_value value;
  value.kind = DG_VALUE_COMPLEX;
  value.as.complex.real = real;
  value.as.complex.imaginary = imaginary;
  return value;
}
static inline dg_value dg_value_string(dg_str string) {
  dg_value value;
  value.kind = DG_VALUE_STRING;
  value.as.string = string;
  return value;
}
static inline dg_value dg_value_tensor(const dg_tensor* tensor) {
  dg_value value;
  value.kind = DG_VALUE_TENSOR;
  value.as.tensor = tensor;
  return value;
}
static inline dg_value dg_value_integers(const int64_t* data, size_t size) {
  dg_value value;
  value.kind = DG_VALUE_INTEGERS;
  value.as.integers.data = data;
  value.as.integers.size = size;
  return value;
}
static inline dg_value dg_value_reals(const double* data, size_t size) {
  dg_value value;
  value.kind = DG_VALUE_REALS;
  value.as.reals.data = data;
  value.as.reals.size = size;
  return value;
}
static inline dg_value dg_value_bools(const uint8_t* data, size_t size) {
  dg_value value;
  value.kind = DG_VALUE_BOOLS;
  value.as.bools.data = data;
  value.as.bools.size = size;
  return value;
}
static inline dg_value dg_value_tensors(const dg_tensor* const* data, size_t size) {
  dg_value value;
  value.kind = DG_VALUE_TENSORS;
  value.as.tensors.data = data;
  value.as.tensors.size = size;
  return value;
}

/* The results of an operator. Immutable. */
typedef struct dg_values dg_values;

DG_API size_t dg_values_count(const dg_values* values) DG_NOEXCEPT;
/* Stores one result. What *out points to lives as long as `values`, the handles of tensors too.
 * DG_INVALID_ARGUMENT for an index beyond the last. */
DG_API DG_MUST_USE dg_error* dg_values_get(const dg_values* values, size_t index,
                                           dg_value* out) DG_NOEXCEPT;
DG_API void dg_values_destroy(dg_values* values) DG_NOEXCEPT;

/* --------------------------------------------------------------------------------- Operators */

/* Runs a torch operator on this thread; autograd records it. `op` is its name with its overload, as
 * in "aten::mm" or "aten::sum.dim_IntList".
 *
 * `arguments` are those of its schema, in order, keyword-only ones too. Those missing at the end
 * get their defaults. Where the schema asks for it, an integer or bool becomes a real, one number
 * fills a list of fixed length, and a number becomes a tensor of no dimensions.
 *
 * While an operator writes to an argument ("aten::add_.Tensor", "aten::add.out"), no other thread
 * may use that tensor, or one that shares its memory, and no call in flight may send it. Torch does
 * not check this.
 *
 * DG_NOT_FOUND for an unknown name; DG_INVALID_ARGUMENT, before anything runs, for arguments
 * that do not fit the schema. */
DG_API DG_MUST_USE dg_error* dg_op_call(dg_str op, const dg_value* arguments, size_t argument_count,
                                        dg_values** out) DG_NOEXCEPT;

/* Returns NULL if an operator is functional: it only computes, and writes to none of its arguments,
 * so that no arguments make it do harm, and a memory-safe language may offer it to safe code.
 * DG_PERMISSION_DENIED if it writes to its arguments, trusts sizes or how its arguments fit
 * together, or touches files or a tensor's storage. Which operators peers may call is another,
 * shorter list (docs/security.md). DG_NOT_FOUND for an unknown name. */
DG_API DG_MUST_USE dg_error* dg_op_check_functional(dg_str op) DG_NOEXCEPT;

/* The same as dg_op_call, for operators whose results are tensors: stores them in
 * outs[0..out_count), those of a list one after the other, and NULL for no tensor.
 * DG_INVALID_ARGUMENT if there are not as many, or if they are not tensors; the operator has run
 * then. */
DG_API DG_MUST_USE dg_error* dg_op_tensors(dg_str op, const dg_value* arguments,
                                           size_t argument_count, dg_tensor** outs,
                                           size_t out_count) DG_NOEXCEPT;

/* ---------------------------------------------------------------------------------- Messages */

/* What a call carries, either way: some bytes and a list of tensors. Immutable. */
typedef struct dg_message dg_message;

/* Creates a message with a copy of the payload and references to the tensors. A NULL among
 * `tensors` is a place without a tensor. */
DG_API DG_MUST_USE dg_error* dg_message_create(const void* payload, size_t payload_size,
                                               const dg_tensor* const* tensors, size_t tensor_count,
                                               dg_message** out) DG_NOEXCEPT;
DG_API void dg_message_destroy(dg_message* message) DG_NOEXCEPT;
/* Returns the payload, which lives as long as `message`. */
DG_API dg_str dg_message_payload(const dg_message* message) DG_NOEXCEPT;
DG_API size_t dg_message_tensor_count(const dg_message* message) DG_NOEXCEPT;
/* Stores a new handle of the tensor at a place; NULL if that place has none. DG_INVALID_ARGUMENT
 * beyond the last place. */
DG_API DG_MUST_USE dg_error* dg_message_tensor(const dg_message* message, size_t index,
                                               dg_tensor** out) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------------- Futures */

/* The outcome of work in flight: not done, or done with a result or an error. Once done, it
 * stays so. Destroying a future neither cancels the work nor waits for it. */
typedef struct dg_future dg_future;

#define DG_FOREVER INT64_C(-1)

/* Waits, at most timeout_ms (0 polls, which is allowed everywhere), and stores whether the
 * future is done. Neither a timeout nor the failure of the work is an error here: ask
 * dg_future_result. */
DG_API DG_MUST_USE dg_error* dg_future_wait(const dg_future* future, int64_t timeout_ms,
                                            bool* done) DG_NOEXCEPT;

/* Returns the error of the work if it failed; else stores its reply: NULL for work without a
 * reply (backward). DG_FAILED_PRECONDITION if the future is not done, or is of an operator. */
DG_API DG_MUST_USE dg_error* dg_future_result(const dg_future* future,
                                              dg_message** reply) DG_NOEXCEPT;
/* Stores the results of an operator on another worker; otherwise as dg_future_result. */
DG_API DG_MUST_USE dg_error* dg_future_values(const dg_future* future, dg_values** out) DG_NOEXCEPT;

/* Calls `done` once the future is done: on the thread that completes it, where `done` must not
 * wait; or within this call, if it is done already. Takes `user_data`. */
DG_API DG_MUST_USE dg_error* dg_future_then(const dg_future* future, void (*done)(void* user_data),
                                            void* user_data,
                                            void (*destroy)(void* user_data)) DG_NOEXCEPT;

/* Cancels a call or a backward: its future is then done, with DG_CANCELLED unless it was done
 * before. A handler that runs already is not stopped, but can see the cancellation, and its
 * answer is dropped. A cancelled backward ends on every worker, and its context is good for
 * dg_context_release only. No effect on a future that is done. Does not wait. */
DG_API DG_MUST_USE dg_error* dg_future_cancel(const dg_future* future) DG_NOEXCEPT;
DG_API void dg_future_destroy(dg_future* future) DG_NOEXCEPT;

/* A completion queue: which futures are done, for the event loop of the program (epoll, libuv,
 * asyncio). Thread-safe, and nothing here waits. */
typedef struct dg_completions dg_completions;

/* DG_RESOURCE_EXHAUSTED if the process has no descriptor left. */
DG_API DG_MUST_USE dg_error* dg_completions_create(dg_completions** out) DG_NOEXCEPT;
/* Returns the file descriptor that is readable while there is something to take; -1 without a
 * queue. It belongs to the queue: neither read it nor close it, and take it out of the loop before
 * the queue is destroyed. */
DG_API int32_t dg_completions_descriptor(const dg_completions* completions) DG_NOEXCEPT;
/* Puts `tag` into the queue once the future is done: at once, if it is done already. The future's
 * handle may be destroyed before that. */
DG_API DG_MUST_USE dg_error* dg_completions_watch(dg_completions* completions,
                                                  const dg_future* future,
                                                  uint64_t tag) DG_NOEXCEPT;
/* Takes the tags of futures that are done, at most `size`, in the order in which they were done,
 * and stores how many; 0 if there are none. */
DG_API DG_MUST_USE dg_error* dg_completions_take(dg_completions* completions, uint64_t* tags,
                                                 size_t size, size_t* count) DG_NOEXCEPT;
/* Futures that are not done by now are no longer watched. */
DG_API void dg_completions_destroy(dg_completions* completions) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------- Cancellations */

/* A cancellation token: the caller that asked for work cancels it, and the handler that does the
 * work checks it now and then, or is called back. */
typedef struct dg_cancellation dg_cancellation;

/* Creates one for calls of this program (dg_call_options). */
DG_API DG_MUST_USE dg_error* dg_cancellation_create(dg_cancellation** out) DG_NOEXCEPT;
/* Fails the calls that were made with it with DG_CANCELLED, and those that are made with it
 * later. Idempotent, does not wait. */
DG_API DG_MUST_USE dg_error* dg_cancellation_cancel(dg_cancellation* cancellation) DG_NOEXCEPT;
/* Returns NULL until it is cancelled; then an error that says why, for a handler to return. */
DG_API DG_MUST_USE dg_error* dg_cancellation_check(const dg_cancellation* cancellation) DG_NOEXCEPT;
/* Calls `cancelled` once it is cancelled: on the thread that cancels it, where `cancelled` must
 * not wait; or within this call, if it is cancelled already. Takes `user_data`, which is
 * destroyed after the call, when the callback is removed, or with the cancellation. Stores in
 * *id (unless that is NULL) a number for dg_cancellation_forget: 0 if the callback has been
 * called. */
DG_API DG_MUST_USE dg_error* dg_cancellation_on_cancel(const dg_cancellation* cancellation,
                                                       void (*cancelled)(void* user_data),
                                                       void* user_data,
                                                       void (*destroy)(void* user_data),
                                                       uint64_t* id) DG_NOEXCEPT;
/* Removes a callback by its number: when this has returned, the callback does not run and is not
 * called any more, and its user_data is destroyed. Waits while another thread runs it, also
 * where other functions that wait are refused, but not in the callback itself. A callback that
 * was called, and an unknown number, are no error. */
DG_API DG_MUST_USE dg_error* dg_cancellation_forget(const dg_cancellation* cancellation,
                                                    uint64_t id) DG_NOEXCEPT;
/* Destroys the handle alone: calls that were made with it go on. */
DG_API void dg_cancellation_destroy(dg_cancellation* cancellation) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------------- Workers */

/* One member of a job: it listens, calls the others, and is called by them. It owns all its
 * threads and sockets; a process may have several, mostly for tests. */
typedef struct dg_worker dg_worker;
typedef struct dg_context dg_context;

/* Bounds on what other workers, and this program, can make a worker hold. Beyond one of them a
 * call fails with DG_RESOURCE_EXHAUSTED and the limit's name; only where bytes_per_peer wait to
 * be sent, calls that wait for their reply wait for credit instead (backpressure). 0 means the
 * default. */
typedef struct dg_limits {
  size_t struct_size;
  uint64_t message_bytes;       /* of one message with its tensors, and of what one operator
                                 * allocates for a peer; 8 GiB */
  uint64_t tensors_per_message; /* 16384 */
  uint64_t calls_per_peer;      /* in flight to one peer, and served here for one; 4096 */
  uint64_t calls;               /* of all peers together; 65536 */
  uint64_t bytes_per_peer;      /* waiting to be sent to one peer, and of its calls here; 4 GiB */
  uint64_t contexts_per_peer;   /* open here, of one origin; 4096 */
  uint64_t unauthenticated_connections; /* whose handshake is not finished; 256 */
  int64_t handshake_timeout_ms;         /* of one connection, and for the peer to close one that is
                                         * refused or given up; 10 seconds */
} dg_limits;
#define DG_LIMITS_INIT \
  { sizeof(dg_limits), 0, 0, 0, 0, 0, 0, 0, 0 }

/* Maps a device of this worker to one of another: a tensor that is sent from `local` arrives
 * on `remote`, and its gradient comes back the same way. */
typedef struct dg_device_pair {
  size_t struct_size;
  dg_str peer;   /* the other worker's name */
  dg_str local;  /* this worker's device, "cuda:0" */
  dg_str remote; /* the other's, "cuda:1" */
} dg_device_pair;
#define DG_DEVICE_PAIR_INIT                          \
  {                                                  \
    sizeof(dg_device_pair), {0, 0}, {0, 0}, { 0, 0 } \
  }

/* TLS by certificates, in the place of a key file or beside one, and whether sockets within the
 * machine are encrypted too. What is empty is as the variable says that stands beside it; `cert`
 * and `key` are given both or neither. docs/security.md, "Certificates". */
typedef struct dg_tls_options {
  size_t struct_size;
  dg_str cert;    /* a PEM file: this process's certificate, and then those between it and the
                   * authority; DISTGRAD_TLS_CERT */
  dg_str key;     /* a PEM file: its private key, without a passphrase; DISTGRAD_TLS_KEY */
  dg_str ca;      /* a PEM file: the authorities whose certificates are accepted; DISTGRAD_TLS_CA */
  dg_str name;    /* that the others' certificates have to have: a DNS name, an IP address or a
                   * URI; DISTGRAD_TLS_NAME, or one of those that this process's own has, but for
                   * localhost and loopback addresses, which every machine has */
  uint64_t flags; /* DG_TLS_... */
} dg_tls_options;
#define DG_TLS_OPTIONS_INIT \
  { sizeof(dg_tls_options), {0, 0}, {0, 0}, {0, 0}, {0, 0}, 0 }
/* Flags of dg_tls_options: whether Unix-domain sockets are encrypted, by certificates or the key.
 * Without one of these two, as DISTGRAD_ENCRYPT_LOCAL says. Not both. */
#define DG_TLS_ENCRYPT_LOCAL UINT64_C(1)
#define DG_TLS_NO_ENCRYPT_LOCAL UINT64_C(2)

typedef struct dg_worker_options {
  size_t struct_size;
  dg_str name;                /* unique in the job; empty: DISTGRAD_NAME, or "worker<rank>" */
  uint32_t rank;              /* in [0, world_size) */
  uint32_t world_size;        /* 0: both come from the rendezvous or the launcher */
  dg_str rendezvous;          /* how the workers find each other:
                               * "tcp://host:port"  worker 0 serves a store there
                               * "file:///path"     a file that all see, new for each job
                               * "env://" or empty  as DISTGRAD_RENDEZVOUS or the launcher says
                               * with "?rank=1&world_size=2" if world_size is 0.
                               * docs/launching.md */
  dg_str transport;           /* "socket"; "tcp" and "shm" are TensorPipe's own; empty:
                               * DISTGRAD_TRANSPORT, or "socket" */
  dg_str host;                /* the address, name or interface to listen on; empty:
                               * DISTGRAD_HOST, or the address by which this machine reaches the
                               * store, or loopback if the store or the whole job is here */
  dg_str key_file;            /* a file with the secret that all workers share; empty: the one
                               * that DISTGRAD_KEY_FILE names, or the secret itself in DISTGRAD_KEY,
                               * or none. With one, TCP is encrypted. docs/security.md */
  uint64_t thread_count;      /* threads that run handlers and backward at the same time; 0: one
                               * for each processor that the process may use */
  int64_t timeout_ms;         /* of calls and passes that set none; 0: one minute */
  int64_t join_timeout_ms;    /* for all workers to join; 0: one minute */
  uint64_t flags;             /* DG_WORKER_... */
  dg_str job;                 /* tells apart jobs that share one rendezvous; without '/' */
  int64_t heartbeat_limit_ms; /* a peer that is silent for so long is lost, though its
                               * connection stands; at least 100; DG_FOREVER: never; 0: 20 s */
  uint64_t max_workers;       /* that may ever join the job; 0: 4096 */
  const dg_limits* limits;    /* NULL: the defaults */
  const dg_device_pair* const* device_pairs; /* one to one for each peer. The CPU always maps to
                                              * the CPU and is left out. It is enough that one of
                                              * the two workers gives the map */
  size_t device_pair_count;
  const dg_tls_options* tls; /* NULL: as the variables say */
} dg_worker_options;
#define DG_WORKER_OPTIONS_INIT                                                                   \
  {                                                                                              \
    sizeof(dg_worker_options), {0, 0}, 0, 0, {0, 0}, {0, 0}, {0, 0}, {0, 0}, 0, 0, 0, 0, {0, 0}, \
        0, 0, 0, 0, 0, 0                                                                         \
  }
/* Flags of dg_worker_options. Which operators the others may call here: without one of these
 * two, a list of torch's (docs/security.md). Not both. */
#define DG_WORKER_NO_OPERATORS UINT64_C(1)  /* none */
#define DG_WORKER_ALL_OPERATORS UINT64_C(2) /* all that this process has */
/* Joins a running job as one more worker: the store gives its rank, and `rank` and `world_size`
 * are ignored. A worker that uses a former name comes back under it. docs/membership.md. */
#define DG_WORKER_JOIN UINT64_C(4)
/* Large tensors on GPUs go through the CPU. Without this flag, and in builds with CUDA, they go
 * straight to the GPUs of workers that do not have it either. docs/cuda.md */
#define DG_WORKER_NO_GPU_CHANNEL UINT64_C(8)

/* Joins the job. Waits until all its workers have joined.
 *
 * DG_INVALID_ARGUMENT for options or variables that make no sense, DG_FAILED_PRECONDITION for an
 * environment that lacks something, DG_DEADLINE_EXCEEDED with the workers that did not come,
 * DG_ALREADY_EXISTS if two claim one rank or name, DG_RESOURCE_EXHAUSTED beyond max_workers,
 * DG_UNAUTHENTICATED for another key than the others', or a certificate that they refuse,
 * DG_UNAVAILABLE if the store is gone. */
DG_API DG_MUST_USE dg_error* dg_worker_create(const dg_worker_options* options,
                                              dg_worker** out) DG_NOEXCEPT;

/* Flag of the three functions below: goes on without a member that is lost, as if it had left.
 * Without this flag they fail with DG_UNAVAILABLE and the member's name as soon as one is lost.
 * With and without it they fail with DG_FAILED_PRECONDITION if this worker was started again in
 * another process, which has taken its place. */
#define DG_GO_ON_WITHOUT_LOST UINT64_C(1)

/* Waits until every worker has called this as often as this one. DG_DEADLINE_EXCEEDED names
 * those that have not. */
DG_API DG_MUST_USE dg_error* dg_worker_barrier(dg_worker* worker, int64_t timeout_ms,
                                               uint64_t flags) DG_NOEXCEPT;

/* Ends the job in good order, so that no call finds this worker gone. Waits until every worker
 * has called this or dg_worker_serve, and until the calls in flight are answered; then destroy
 * the worker. DG_FOREVER is a good timeout: if the job cannot end well, this returns an error.
 * DG_FAILED_PRECONDITION in a handler of this worker. */
DG_API DG_MUST_USE dg_error* dg_worker_shutdown(dg_worker* worker, int64_t timeout_ms,
                                                uint64_t flags) DG_NOEXCEPT;

/* Serves until the job ends: until all others have left, or have called this or
 * dg_worker_shutdown. For a worker that only answers the others from now on. The same as
 * dg_worker_shutdown without a timeout. Waits. */
DG_API DG_MUST_USE dg_error* dg_worker_serve(dg_worker* worker, uint64_t flags) DG_NOEXCEPT;

/* Leaves in good order while the job goes on: refuses new calls of the others with
 * DG_UNAVAILABLE. Waits until calls in flight and the contexts that this worker takes part in are
 * over; then destroy the worker. DG_DEADLINE_EXCEEDED counts those that are left. Call it
 * once. DG_FAILED_PRECONDITION in a handler of this worker, and for the worker that serves the
 * rendezvous. */
DG_API DG_MUST_USE dg_error* dg_worker_leave(dg_worker* worker, int64_t timeout_ms) DG_NOEXCEPT;

/* Ends the worker, but keeps its handle. Fails what is in flight with DG_CANCELLED, also for other
 * threads that wait in this worker (in dg_worker_barrier, dg_worker_shutdown and dg_worker_serve
 * after a second, or some seconds where the job's store is silent); waits until running handlers
 * and callbacks have returned; and stops all threads. From then on functions of the worker give
 * DG_FAILED_PRECONDITION; handles of its contexts, futures and optimizers stay valid, and give
 * errors. Idempotent. Waits, at most timeout_ms (0: not at all).
 *
 * DG_DEADLINE_EXCEEDED says what still runs: that goes on, and the worker stays, without new
 * work; call this again, or dg_worker_destroy, which then does not wait. DG_FAILED_PRECONDITION
 * in a handler or callback of this worker. */
DG_API DG_MUST_USE dg_error* dg_worker_close(dg_worker* worker, int64_t timeout_ms) DG_NOEXCEPT;

/* Calls dg_worker_close with a timeout of one minute, and destroys the handle. What still runs
 * after that minute is logged, and a thread of the library ends the worker when it has returned:
 * until then callbacks may still run, and use their user_data. In a handler or callback of this
 * worker, in the callback of a future and in destructors of user data this does not wait, and
 * that thread does all of it. */
DG_API void dg_worker_destroy(dg_worker* worker) DG_NOEXCEPT;

/* Returns 0 if `worker` is not a valid handle. */
DG_API uint32_t dg_worker_rank(const dg_worker* worker) DG_NOEXCEPT;

/* Reads all members from the store, as dg_worker_barrier does. Without it a worker knows the
 * members of the job's start, and of those who joined later the ones that have called it. Waits. */
DG_API DG_MUST_USE dg_error* dg_worker_update_members(dg_worker* worker) DG_NOEXCEPT;
/* Returns how many members the worker knows of, without those that have left, so that ranks may
 * have gaps. 0 if `worker` is not a valid handle. */
DG_API uint32_t dg_worker_world_size(const dg_worker* worker) DG_NOEXCEPT;
/* Returns the name of the member with that rank. It lives as long as `worker`; empty if there is
 * no such member. */
DG_API dg_str dg_worker_name(const dg_worker* worker, uint32_t rank) DG_NOEXCEPT;

/* A member of a job. Borrowed for the visit; fields are only ever added. */
typedef struct dg_member {
  size_t struct_size; /* as the library knows it */
  dg_str name;
  uint64_t rank;
  uint64_t incarnation; /* greater for each later start of a worker of that name */
} dg_member;
/* Calls `visit` within this call for each member that the worker knows of, by rank. */
DG_API DG_MUST_USE dg_error* dg_worker_members(const dg_worker* worker,
                                               void (*visit)(void* user_data,
                                                             const dg_member* member),
                                               void* user_data) DG_NOEXCEPT;

/* What happened to a member. Borrowed for the call; fields are only ever added. */
typedef struct dg_member_event {
  size_t struct_size; /* as the library knows it */
  uint64_t kind;
  dg_str name;
  uint64_t rank;
  uint64_t incarnation;
  dg_str reason; /* why it counts as lost */
} dg_member_event;
enum {
  DG_MEMBER_JOINED = 1, /* it is new, or has come back */
  DG_MEMBER_LEFT = 2,   /* in good order */
  DG_MEMBER_LOST = 3    /* it died, or is silent */
};
/* Calls `callback` for each event from now on, once and in order, on a thread of the worker,
 * where it may wait and make calls as a handler may. It replaces the former callback; NULL
 * removes that. When this has returned, the former callback is not called any more. When
 * dg_worker_close has returned without an error, no callback is called any more; nor is one after
 * dg_worker_destroy, unless one still ran after its minute. Takes `user_data`. Waits until the
 * former callback has returned, unless it is called there. */
DG_API DG_MUST_USE dg_error* dg_worker_on_member(
    dg_worker* worker, void (*callback)(void* user_data, const dg_member_event* event),
    void* user_data, void (*destroy)(void* user_data)) DG_NOEXCEPT;

/* Return the worker's number among the workers of its machine, and how many these are, as the
 * launcher says: to choose a device by. 0 and 0 if it says nothing. */
DG_API uint32_t dg_worker_local_rank(const dg_worker* worker) DG_NOEXCEPT;
DG_API uint32_t dg_worker_local_world_size(const dg_worker* worker) DG_NOEXCEPT;
/* Returns how many contexts this worker knows of. */
DG_API size_t dg_worker_context_count(const dg_worker* worker) DG_NOEXCEPT;

/* Stores metrics of what the worker has done so far, in Prometheus' text format (version 0.0.4),
 * as the payload of *out. docs/metrics.md explains each number. */
DG_API DG_MUST_USE dg_error* dg_worker_metrics_text(const dg_worker* worker,
                                                    dg_message** out) DG_NOEXCEPT;

typedef struct dg_trace_options {
  size_t struct_size;
  uint64_t max_bytes; /* of memory, and as much again for what pipelines do; events that do not fit
                       * are counted only; 0: 64 MiB */
} dg_trace_options;
#define DG_TRACE_OPTIONS_INIT \
  { sizeof(dg_trace_options), 0 }

/* Starts to record when calls are made and served, when passes run, and what the ranks of pipelines
 * do. DG_FAILED_PRECONDITION while a trace runs. */
DG_API DG_MUST_USE dg_error* dg_worker_start_trace(dg_worker* worker,
                                                   const dg_trace_options* options) DG_NOEXCEPT;
/* Ends the trace. What began and ended meanwhile becomes the payload of *out, in Chrome's trace
 * event format (JSON), for ui.perfetto.dev and chrome://tracing to open; docs/trace.md explains
 * it. DG_FAILED_PRECONDITION if no trace runs. */
DG_API DG_MUST_USE dg_error* dg_worker_stop_trace(dg_worker* worker, dg_message** out) DG_NOEXCEPT;

/* A backward pass that runs on a worker, and what it waits for. Borrowed for the visit. Fields are
 * only ever added. */
typedef struct dg_pass_state {
  size_t struct_size; /* as the library knows it */
  uint64_t id;        /* the initiator's rank in the top 16 bits */
  uint64_t flags;     /* DG_BACKWARD_... */
  uint64_t busy;      /* send nodes and roots that run or are about to */
  /* The ranks of the workers whose gradients have not come, once for each message sent there. */
  const uint32_t* awaited;
  size_t awaited_count;
  /* The ranks of the workers that have not acknowledged a message, once for each message. */
  const uint32_t* unacknowledged;
  size_t unacknowledged_count;
} dg_pass_state;

/* What a worker holds of a context. Borrowed for the visit; fields are only ever added. */
typedef struct dg_context_state {
  size_t struct_size; /* as the library knows it */
  uint64_t id;        /* the origin's rank in the top 16 bits */
  uint64_t sends;     /* messages sent, and received, with tensors that require grad */
  uint64_t receives;
  uint64_t gradients;    /* of leaves of this worker */
  const uint32_t* peers; /* the ranks of the workers with which it exchanged messages */
  size_t peer_count;
  const dg_pass_state* const* passes;
  size_t pass_count;
} dg_context_state;

/* Calls `visit` within this call for each context that this worker knows of, to show what a job
 * waits for. Waits for running steps of passes, not for passes. */
DG_API DG_MUST_USE dg_error* dg_worker_contexts(const dg_worker* worker,
                                                void (*visit)(void* user_data,
                                                              const dg_context_state* context),
                                                void* user_data) DG_NOEXCEPT;

/* The request that a handler gets; all of it is borrowed for the call. Fields are only ever
 * added. */
typedef struct dg_request {
  size_t struct_size; /* as the library knows it */
  dg_str function;
  uint64_t from; /* the caller's rank */
  const dg_message* message;
  const dg_context* context;           /* the caller's; NULL: none */
  int64_t timeout_ms;                  /* how long the caller still waits, as the handler begins
                                        * (DG_FOREVER: it has no deadline); nested calls get what
                                        * is left of it */
  const dg_cancellation* cancellation; /* cancelled as soon as nobody waits for the answer: the
                                        * caller gave up, or is gone; pass it on to nested calls */
} dg_request;

/* A remote function. Runs on a thread of the worker, several at once; may wait and make calls.
 * It stores the reply, which the library takes (NULL: an empty one), and returns NULL; or it
 * returns an error, which the library takes, and whose code the caller gets. */
typedef dg_error* (*dg_handler)(void* user_data, const dg_request* request, dg_message** reply);

/* Lets all workers call `function`. Takes `user_data`. Earlier calls are refused, so register
 * before the others may call: before a dg_worker_barrier, for instance. DG_ALREADY_EXISTS if
 * `function` is registered; DG_INVALID_ARGUMENT if the name is empty, longer than 1000 bytes,
 * contains "::" (as operators' names do) or begins with "distgrad.". */
DG_API DG_MUST_USE dg_error* dg_worker_register(dg_worker* worker, dg_str function,
                                                dg_handler handler, void* user_data,
                                                void (*destroy)(void* user_data)) DG_NOEXCEPT;

/* Carries the answer of a handler that answers later. Destroying one without an answer gives the
 * caller DG_INTERNAL. */
typedef struct dg_responder dg_responder;

/* A remote function whose answer may come after it has returned, from any thread; no thread is
 * held meanwhile. It owns the responder, and passes it to dg_responder_answer or
 * dg_responder_destroy. The request and all in it live until then. */
typedef void (*dg_responder_handler)(void* user_data, const dg_request* request,
                                     dg_responder* responder);

/* The same as dg_worker_register, for such a handler. */
DG_API DG_MUST_USE dg_error* dg_worker_register_responder(
    dg_worker* worker, dg_str function, dg_responder_handler handler, void* user_data,
    void (*destroy)(void* user_data)) DG_NOEXCEPT;

/* Answers with the error, or, if that is NULL, with the reply (NULL: an empty one). Takes all
 * three. If nobody waits for the answer any more, it is dropped, which is no error.
 * DG_INVALID_ARGUMENT if `reply` is not a message; the caller gets DG_INTERNAL then. */
DG_API DG_MUST_USE dg_error* dg_responder_answer(dg_responder* responder, dg_message* reply,
                                                 dg_error* error) DG_NOEXCEPT;
DG_API void dg_responder_destroy(dg_responder* responder) DG_NOEXCEPT;

/* Calls `wait` on this thread and returns; in a handler, other handlers may run meanwhile in its
 * place. For handlers that wait for something which is not distgrad's, a lock or a condition,
 * and which other handlers may have to bring about. Waits. */
DG_API DG_MUST_USE dg_error* dg_wait(void (*wait)(void* user_data), void* user_data) DG_NOEXCEPT;

typedef struct dg_call_options {
  size_t struct_size;
  const dg_context* context;           /* records the call for its backward; NULL: none */
  int64_t timeout_ms;                  /* 0: as in dg_worker_options */
  const dg_cancellation* cancellation; /* cancels the call too; NULL: only its future does */
} dg_call_options;
#define DG_CALL_OPTIONS_INIT \
  { sizeof(dg_call_options), 0, 0, 0 }

/* Calls a function of the worker named `to` (which may be this one). Waits for the reply, and
 * before it for credit (dg_limits.bytes_per_peer).
 *
 * Inside a context gradients will flow back through the tensors that require grad, both ways. Large
 * tensors are sent without a copy: do not write to them before the reply has come.
 *
 * The handler's error keeps its code; dg_error_origin tells it from others. Besides:
 * DG_NOT_FOUND for an unknown worker or function, DG_UNAVAILABLE if the connection breaks or the
 * other worker leaves, DG_DEADLINE_EXCEEDED, DG_CANCELLED by a cancellation or the end of this
 * worker, DG_RESOURCE_EXHAUSTED with the name of a limit. */
DG_API DG_MUST_USE dg_error* dg_worker_call(dg_worker* worker, dg_str to, dg_str function,
                                            const dg_message* request,
                                            const dg_call_options* options,
                                            dg_message** reply) DG_NOEXCEPT;
/* The same without waiting: dg_future_result gives the reply. DG_RESOURCE_EXHAUSTED, as the
 * future's error, if there is no credit. */
DG_API DG_MUST_USE dg_error* dg_worker_call_async(dg_worker* worker, dg_str to, dg_str function,
                                                  const dg_message* request,
                                                  const dg_call_options* options,
                                                  dg_future** out) DG_NOEXCEPT;

/* The same on several workers, at once and with one message, which is encoded only once. For
 * each of them, in their order, stores either replies[i] or errors[i], which the caller owns,
 * and NULL in the other. Waits for all. A returned error is about the arguments, and no call was
 * made. */
DG_API DG_MUST_USE dg_error* dg_worker_call_each(dg_worker* worker, const dg_str* to,
                                                 size_t to_count, dg_str function,
                                                 const dg_message* request,
                                                 const dg_call_options* options,
                                                 dg_message** replies,
                                                 dg_error** errors) DG_NOEXCEPT;

/* Runs an operator on the worker named `to`, as dg_op_call does here. Waits for the results. */
DG_API DG_MUST_USE dg_error* dg_worker_call_op(dg_worker* worker, dg_str to, dg_str op,
                                               const dg_value* arguments, size_t argument_count,
                                               const dg_call_options* options,
                                               dg_values** out) DG_NOEXCEPT;
/* The same without waiting, as dg_worker_call_async: dg_future_values gives the results. */
DG_API DG_MUST_USE dg_error* dg_worker_call_op_async(dg_worker* worker, dg_str to, dg_str op,
                                                     const dg_value* arguments,
                                                     size_t argument_count,
                                                     const dg_call_options* options,
                                                     dg_future** out) DG_NOEXCEPT;

/* ---------------------------------------------------------------------------------- Autograd */

/* Creates a context: one training step across workers, with what was sent and received in it,
 * and the gradients that its backward gave. */
DG_API DG_MUST_USE dg_error* dg_context_create(dg_worker* worker, dg_context** out) DG_NOEXCEPT;

/* Ends the context on every worker; a pass in flight fails. Idempotent, does not wait. */
DG_API DG_MUST_USE dg_error* dg_context_release(dg_context* context) DG_NOEXCEPT;
/* Destroys the handle, and releases the context, also while other threads are in a call or a
 * backward of it. (A handler's context is not released by that.) */
DG_API void dg_context_destroy(dg_context* context) DG_NOEXCEPT;

/* Returns the same number on all workers; 0 if `context` is not a valid handle. */
DG_API uint64_t dg_context_id(const dg_context* context) DG_NOEXCEPT;

typedef struct dg_backward_options {
  size_t struct_size;
  uint64_t flags;                         /* DG_BACKWARD_... */
  int64_t timeout_ms;                     /* 0: as in dg_worker_options */
  const dg_tensor* const* root_gradients; /* one for each root, of its shape. A NULL, or no array,
                                           * means a gradient of 1, for real roots of one
                                           * element. */
} dg_backward_options;
#define DG_BACKWARD_OPTIONS_INIT \
  { sizeof(dg_backward_options), 0, 0, 0 }
#define DG_BACKWARD_RETAIN_GRAPH UINT64_C(1) /* another backward may follow; gradients add up */

/* Computes the gradients of everything that `roots` depend on, on every worker. Waits until they
 * are in place everywhere. Roots are tensors that were computed on this worker, from something that
 * requires grad. After an error the context is good for dg_context_release only.
 *
 * The error of a node keeps its code and names worker and node. Besides: DG_FAILED_PRECONDITION
 * if the graph is used up or the context released, DG_DEADLINE_EXCEEDED with what was waited
 * for, DG_UNAVAILABLE if a worker that takes part is lost, DG_CANCELLED. */
DG_API DG_MUST_USE dg_error* dg_context_backward(const dg_context* context,
                                                 const dg_tensor* const* roots, size_t root_count,
                                                 const dg_backward_options* options) DG_NOEXCEPT;
/* The same without waiting: dg_future_result gives the outcome, and no reply. */
DG_API DG_MUST_USE dg_error* dg_context_backward_async(const dg_context* context,
                                                       const dg_tensor* const* roots,
                                                       size_t root_count,
                                                       const dg_backward_options* options,
                                                       dg_future** out) DG_NOEXCEPT;

/* Stores the gradient of a leaf of this worker. DG_NOT_FOUND if no root depends on it,
 * DG_FAILED_PRECONDITION once the context is released. */
DG_API DG_MUST_USE dg_error* dg_context_gradient(const dg_context* context, const dg_tensor* leaf,
                                                 dg_tensor** out) DG_NOEXCEPT;
/* Replaces the gradient of a leaf that has one, by a copy. DG_INVALID_ARGUMENT unless it has the
 * shape, dtype and device of the leaf; else errors as of dg_context_gradient. */
DG_API DG_MUST_USE dg_error* dg_context_set_gradient(const dg_context* context,
                                                     const dg_tensor* leaf,
                                                     const dg_tensor* gradient) DG_NOEXCEPT;
/* Calls `visit` within this call for every leaf of this worker that has a gradient, in no order,
 * with handles that are borrowed for the visit. On an error it is not called at all:
 * DG_FAILED_PRECONDITION once the context is released. */
DG_API DG_MUST_USE dg_error* dg_context_gradients(const dg_context* context,
                                                  void (*visit)(void* user_data,
                                                                const dg_tensor* leaf,
                                                                const dg_tensor* gradient),
                                                  void* user_data) DG_NOEXCEPT;

/* Moves the gradients of contexts[0..count) into the first of them, on every worker of the job, for
 * gradient accumulation: each leaf then has there what the first context had for it, to which
 * those of the others were added in their order: to the last bit what one process gives that adds
 * up the backwards of each context first; the others have no gradients any more. A step, clipping
 * and an average take the sums from the first context, which is the worker's; the others are of its
 * job. Call it when the backwards are over. Waits for all workers. DG_INVALID_ARGUMENT, and nothing
 * has changed, without a context, or with one that is there twice; DG_FAILED_PRECONDITION for one
 * that is released, or whose average in its backward was not taken. After an error of a worker the
 * contexts are good for dg_context_release only. */
DG_API DG_MUST_USE dg_error* dg_worker_sum_gradients(dg_worker* worker,
                                                     const dg_context* const* contexts,
                                                     size_t count) DG_NOEXCEPT;

/* -------------------------------------------------------------------------------- Optimizers */

/* This worker's part of an optimizer that all workers of the job share under a name: each gives
 * its own parameters (there may be none), and one of them asks for a step. Where only some workers
 * have parts, dg_optimizer_set_workers says which: a step does not pass over others by itself,
 * since a part that was forgotten would never be trained, and nobody would hear of it. */
typedef struct dg_optimizer dg_optimizer;

/* Unlike elsewhere, 0 is not the default in these: start from the INIT macros, which have the
 * defaults. */
typedef struct dg_sgd_options {
  size_t struct_size;
  double learning_rate;
  double momentum;
  double dampening;
  double weight_decay;
  uint64_t flags; /* DG_SGD_... */
} dg_sgd_options;
#define DG_SGD_OPTIONS_INIT \
  { sizeof(dg_sgd_options), 1e-3, 0, 0, 0, 0 }
#define DG_SGD_NESTEROV UINT64_C(1)

typedef struct dg_adam_options {
  size_t struct_size;
  double learning_rate;
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  uint64_t flags; /* DG_ADAM_... */
} dg_adam_options;
#define DG_ADAM_OPTIONS_INIT \
  { sizeof(dg_adam_options), 1e-3, 0.9, 0.999, 1e-8, 0, 0 }
#define DG_ADAMW_OPTIONS_INIT \
  { sizeof(dg_adam_options), 1e-3, 0.9, 0.999, 1e-8, 1e-2, 0 }
#define DG_ADAM_AMSGRAD UINT64_C(1)

/* Creates this worker's part; every worker does so before the first step. The part lasts until
 * dg_optimizer_remove, or as long as the worker, also when its handle is destroyed.
 * DG_ALREADY_EXISTS if the worker has one of that name (the empty name counts);
 * DG_INVALID_ARGUMENT for a name of more than 900 bytes or with a "::" in it, and for a
 * parameter that is not a leaf that requires grad.
 *
 * With NULL for `worker` it is a local optimizer, which has no part elsewhere: its steps, clips and
 * learning rates are for its own parameters, run on the thread that asks for them, and take any
 * context of this process. So it is what the step of a dg_pipeline_stage calls. It lasts until its
 * handle is destroyed, and as long as the dg_checkpoint_part that has it; its name is for its
 * errors alone. */
DG_API DG_MUST_USE dg_error* dg_optimizer_create_sgd(dg_worker* worker, dg_str name,
                                                     const dg_tensor* const* parameters,
                                                     size_t parameter_count,
                                                     const dg_sgd_options* options,
                                                     dg_optimizer** out) DG_NOEXCEPT;
DG_API DG_MUST_USE dg_error* dg_optimizer_create_adam(dg_worker* worker, dg_str name,
                                                      const dg_tensor* const* parameters,
                                                      size_t parameter_count,
                                                      const dg_adam_options* options,
                                                      dg_optimizer** out) DG_NOEXCEPT;
/* AdamW: Adam with decoupled weight decay. NULL options are those of DG_ADAMW_OPTIONS_INIT. */
DG_API DG_MUST_USE dg_error* dg_optimizer_create_adamw(dg_worker* worker, dg_str name,
                                                       const dg_tensor* const* parameters,
                                                       size_t parameter_count,
                                                       const dg_adam_options* options,
                                                       dg_optimizer** out) DG_NOEXCEPT;

/* Names the workers that have parts, this one among them, for the steps, learning rates and
 * clips that are asked for by this handle, from the next one on; without it these are all
 * workers of the job, also those that join later, but for learning rates (below).
 * DG_INVALID_ARGUMENT, and nothing is changed, if a name is there twice, or this worker's is not;
 * DG_FAILED_PRECONDITION for a local optimizer. */
DG_API DG_MUST_USE dg_error* dg_optimizer_set_workers(dg_optimizer* optimizer,
                                                      const dg_str* workers,
                                                      size_t worker_count) DG_NOEXCEPT;

/* Steps the parts of all workers, each from its own gradients in the context. Waits for all.
 * Parameters that have none there are left alone: so a local optimizer does nothing with a context
 * of a worker that has not computed its gradients. Returns the first error, by rank, after which
 * the others may have stepped: the same step is not to be asked for again, then. DG_NOT_FOUND for a
 * worker that has no part; DG_FAILED_PRECONDITION for a context that is released. */
DG_API DG_MUST_USE dg_error* dg_optimizer_step(dg_optimizer* optimizer,
                                               const dg_context* context) DG_NOEXCEPT;

/* Clips the gradients of the parts of all workers by their global norm, before a step: the
 * 2-norm of all of them as one vector, in which a tied parameter of a pipeline is there once,
 * however many copies of it there are. If it is more than max_norm (not negative) they are
 * scaled down to that. Stores the norm before; 0 if there are no gradients. Waits for all.
 * Errors as of a step, and DG_OUT_OF_RANGE, with nothing scaled, if the norm is not finite. */
DG_API DG_MUST_USE dg_error* dg_optimizer_clip_gradients(dg_optimizer* optimizer,
                                                         const dg_context* context, double max_norm,
                                                         double* norm) DG_NOEXCEPT;

/* Sets the learning rate of the parts of all workers, from the next step on: for schedules.
 * Waits for all. Without dg_optimizer_set_workers() these are those that this worker has heard of
 * (dg_worker_members): where workers join, dg_worker_update_members() comes before it. Errors as of
 * a step; DG_INVALID_ARGUMENT, and nothing is changed, if it is negative or not finite. */
DG_API DG_MUST_USE dg_error* dg_optimizer_set_learning_rate(dg_optimizer* optimizer,
                                                            double learning_rate) DG_NOEXCEPT;

/* Gives this worker's part as tensors with names: calls `visit` within this call for each, with
 * handles of copies that are borrowed for the visit. The names are the paths in the state_dict()
 * of PyTorch's optimizer, joined by dots: "param_groups.0.lr", "state.2.exp_avg",
 * "state.2.step"; parameters count from 0 in the order of dg_optimizer_create_.... A parameter
 * that has not taken a step has no state. On an error `visit` is not called at all. Waits for a
 * step that runs. */
DG_API DG_MUST_USE dg_error* dg_optimizer_state(dg_optimizer* optimizer,
                                                void (*visit)(void* user_data, dg_str name,
                                                              const dg_tensor* tensor),
                                                void* user_data) DG_NOEXCEPT;
/* Replaces all that this worker's part holds, its learning rate and other options too, by copies
 * of tensors[0..count). Numbers may be of any dtype that holds them. DG_INVALID_ARGUMENT, with
 * nothing changed, says what is missing, what is unexpected, and what has another shape or
 * dtype, or makes no sense. Waits for a step that runs. */
DG_API DG_MUST_USE dg_error* dg_optimizer_load_state(dg_optimizer* optimizer, const dg_str* names,
                                                     const dg_tensor* const* tensors,
                                                     size_t count) DG_NOEXCEPT;

/* Removes this worker's part: when this has returned no step touches its parameters, and the
 * worker may create another one of that name. Steps then give DG_NOT_FOUND, also those that
 * other workers ask for: so all workers remove theirs. Idempotent; the handle is still to be
 * destroyed. Waits for a step that runs. */
DG_API DG_MUST_USE dg_error* dg_optimizer_remove(dg_optimizer* optimizer) DG_NOEXCEPT;
/* Destroys the handle alone: the part goes on, unless it is a local optimizer. */
DG_API void dg_optimizer_destroy(dg_optimizer* optimizer) DG_NOEXCEPT;

/* --------------------------------------------------------------------------- Files of tensors */

/* Tensors with names in safetensors files, as Python's `safetensors` and what builds on it read and
 * write them. A file that is read may come from anybody: it is checked before it is used, and an
 * error names the file and the tensor. docs/checkpoints.md says what a file has of a tensor.
 *
 * Errors of all these functions: those of the operating system (DG_NOT_FOUND,
 * DG_PERMISSION_DENIED, DG_RESOURCE_EXHAUSTED if the disk is full, ...); DG_INVALID_ARGUMENT for a
 * file that is no such file, or a damaged one, for names that are not UTF-8, and for a name that is
 * given twice. All that read or write a file are marked "Waits". */

/* A name with a value. Never grows. */
typedef struct dg_entry {
  dg_str name;
  dg_str value;
} dg_entry;

/* Writes tensors, of whichever devices, and metadata (UTF-8) to a file: all or nothing, and when
 * this has returned on the disk. Tensors that share memory are each written in full.
 * DG_INVALID_ARGUMENT also for tensors that are not dense, or of a dtype that the format lacks;
 * DG_ABORTED while another save to that path is in flight. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_save(dg_str path, const dg_str* names,
                                                 const dg_tensor* const* tensors, size_t count,
                                                 const dg_entry* metadata,
                                                 size_t metadata_count) DG_NOEXCEPT;

/* Reads all tensors of a file, onto the CPU: calls `visit` within this call for each, by name, with
 * handles that are borrowed for the visit. On an error `visit` is not called at all. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_load(dg_str path,
                                                 void (*visit)(void* user_data, dg_str name,
                                                               const dg_tensor* tensor),
                                                 void* user_data) DG_NOEXCEPT;
/* Writes what is in a file to tensors, on whichever devices and with whichever strides. Converts
 * nothing. DG_INVALID_ARGUMENT, and nothing is written, also lists what is missing in the file,
 * what is unexpected in it, what has another dtype or shape, and what shares memory with another
 * tensor for which the file has other values. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_load_into(dg_str path, const dg_str* names,
                                                      const dg_tensor* const* tensors,
                                                      size_t count) DG_NOEXCEPT;

/* A file that is open: its header is in memory, and each tensor is read when it is asked for. It
 * stays the same file if another one takes its name. */
typedef struct dg_safetensors_file dg_safetensors_file;

/* A tensor in a file. Borrowed for the visit; fields are only ever added. */
typedef struct dg_safetensors_info {
  size_t struct_size; /* as the library knows it */
  dg_str name;
  int64_t dtype; /* a dg_dtype */
  const int64_t* shape;
  size_t dim_count;
  uint64_t bytes; /* that it has in the file */
} dg_safetensors_info;

/* Opens a file, and reads and checks its header. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_file_open(dg_str path,
                                                      dg_safetensors_file** out) DG_NOEXCEPT;
/* Calls `visit` within this call for each tensor of the file, by name. */
DG_API DG_MUST_USE dg_error* dg_safetensors_file_tensors(
    const dg_safetensors_file* file,
    void (*visit)(void* user_data, const dg_safetensors_info* info), void* user_data) DG_NOEXCEPT;
/* Calls `visit` within this call for each entry of the file's metadata, by name. */
DG_API DG_MUST_USE dg_error* dg_safetensors_file_metadata(const dg_safetensors_file* file,
                                                          void (*visit)(void* user_data,
                                                                        const dg_entry* entry),
                                                          void* user_data) DG_NOEXCEPT;
/* Reads a tensor, onto the CPU. DG_NOT_FOUND if the file has none of that name; DG_DATA_LOSS if the
 * file has become shorter since it was opened. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_file_read(const dg_safetensors_file* file, dg_str name,
                                                      dg_tensor** out) DG_NOEXCEPT;
/* Writes what the file has under that name to a tensor, as dg_safetensors_load_into does. After an
 * error of the file some of it may have been written. Waits. */
DG_API DG_MUST_USE dg_error* dg_safetensors_file_read_into(const dg_safetensors_file* file,
                                                           dg_str name,
                                                           const dg_tensor* tensor) DG_NOEXCEPT;
DG_API void dg_safetensors_file_destroy(dg_safetensors_file* file) DG_NOEXCEPT;

/* Saves this worker's part of an optimizer to a file, by the names of its parameters, and loads it
 * from one; a load replaces its state and all its options. parameters[0..count) may be more than
 * the optimizer has. A step waits for copies in memory while it is saved, and for all of it while
 * it is loaded. DG_INVALID_ARGUMENT also if a parameter of the optimizer has no name here; for the
 * save of a state that a load would refuse; and, with nothing changed, for what is missing in the
 * file, unexpected in it, or of another shape or dtype; DG_NOT_FOUND once the part is removed, and
 * for a file that is not there.
 * docs/checkpoints.md, "Optimizers", has the names in the file, and how Python reads and writes it.
 * Waits. */
DG_API DG_MUST_USE dg_error* dg_optimizer_save(dg_optimizer* optimizer, const dg_str* names,
                                               const dg_tensor* const* parameters, size_t count,
                                               dg_str path) DG_NOEXCEPT;
DG_API DG_MUST_USE dg_error* dg_optimizer_load(dg_optimizer* optimizer, const dg_str* names,
                                               const dg_tensor* const* parameters, size_t count,
                                               dg_str path) DG_NOEXCEPT;

/* ------------------------------------------------------------------------ Checkpoints of a job */

/* The state of a whole job at one step: what the parts of its workers have, in a folder that all
 * workers see under the same path. Each worker creates its part; one of them has a manager, which
 * saves and loads all parts. docs/checkpoints.md. */

/* What save_values gives. Borrowed for its call. */
typedef struct dg_checkpoint_values dg_checkpoint_values;
/* Adds a copy of a value, which may be any bytes, or replaces the one of that name.
 * DG_INVALID_ARGUMENT for a name that is not UTF-8. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_values_set(dg_checkpoint_values* values, dg_str name,
                                                      dg_str value) DG_NOEXCEPT;

/* The values of one worker. Borrowed for the call; fields are only ever added. */
typedef struct dg_checkpoint_worker_values {
  size_t struct_size; /* as the library knows it */
  dg_str worker;
  const dg_entry* values; /* by name */
  size_t value_count;
} dg_checkpoint_worker_values;

/* What load_values gets. Borrowed for the call; fields are only ever added. */
typedef struct dg_loaded_values {
  size_t struct_size; /* as the library knows it */
  int64_t step;
  const dg_entry* values; /* what the worker of this name saved, by name; else none */
  size_t value_count;
  const dg_checkpoint_worker_values* const* workers; /* all that saved, by name */
  size_t worker_count;
} dg_loaded_values;

/* What a worker has of a checkpoint. */
typedef struct dg_checkpoint_contents {
  size_t struct_size;
  /* Parameters and buffers, by names that are theirs in the whole job. What several workers have
   * under one name is the same tensor (replicas), and one of them saves it. */
  const dg_str* tensor_names;
  const dg_tensor* const* tensors;
  size_t tensor_count;
  /* By names of letters, digits, '_' and '-'. Of the part's own worker, or local ones; their
   * parameters are among the tensors. */
  const dg_str* optimizer_names;
  dg_optimizer* const* optimizers;
  size_t optimizer_count;
  /* Adds to `values` small things that are no tensors (1 MiB of them at most): the epoch, the place
   * in the data, the state of a random generator. Called for each save; NULL: none. */
  dg_error* (*save_values)(void* user_data, dg_checkpoint_values* values);
  /* Called when this worker's tensors and optimizers are loaded; NULL: not at all. */
  dg_error* (*load_values)(void* user_data, const dg_loaded_values* loaded);
} dg_checkpoint_contents;
#define DG_CHECKPOINT_CONTENTS_INIT \
  { sizeof(dg_checkpoint_contents), 0, 0, 0, 0, 0, 0, 0, 0 }

/* What a worker has of the checkpoints of that name, which managers of whichever worker of the job
 * save and load. */
typedef struct dg_checkpoint_part dg_checkpoint_part;

/* Creates the part of this worker; every worker does so before the first save or load. It keeps
 * tensors and optimizers, and lasts until dg_checkpoint_part_remove, or as long as the worker, also
 * when its handle is destroyed. An optimizer that is removed before it makes saves and loads fail
 * with DG_FAILED_PRECONDITION.
 *
 * save_values and load_values return NULL, or an error, which the library takes, and with which the
 * save or load fails: its dg_error_origin is DG_ORIGIN_HANDLER on this worker. They run on threads
 * of the worker, one at a time, as handlers do: they may wait and make calls, but not save or load.
 * Takes `user_data`.
 *
 * DG_ALREADY_EXISTS if the worker has a part of that name (the empty name counts);
 * DG_INVALID_ARGUMENT for a name of more than 900 bytes or with a "::" in it, for tensors that no
 * file can have, by their dtype, say, or their name (which is UTF-8, and not "__metadata__"), for
 * those that share memory with themselves, for an optimizer of another worker, for a parameter of
 * an optimizer that is not among the tensors, and for an optimizer's state that a load would
 * refuse; DG_FAILED_PRECONDITION for an optimizer that was removed. Waits for steps of the
 * optimizers. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_part_create(dg_worker* worker, dg_str name,
                                                       const dg_checkpoint_contents* contents,
                                                       void* user_data,
                                                       void (*destroy)(void* user_data),
                                                       dg_checkpoint_part** out) DG_NOEXCEPT;
/* Removes the part: when this has returned, no save or load touches its tensors or calls its
 * functions, and the worker may create another one of that name. A save or load that runs fails.
 * Idempotent; the handle is still to be destroyed. Waits for what runs. DG_FAILED_PRECONDITION in
 * save_values and load_values of the part, and once dg_worker_close has begun: that ends the part,
 * so wait for it instead. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_part_remove(dg_checkpoint_part* part) DG_NOEXCEPT;
/* Destroys the handle alone: the part goes on. */
DG_API void dg_checkpoint_part_destroy(dg_checkpoint_part* part) DG_NOEXCEPT;

/* Saves and loads what all parts of one name have. */
typedef struct dg_checkpoint_manager dg_checkpoint_manager;

typedef struct dg_checkpoint_manager_options {
  size_t struct_size;
  dg_str name;           /* that of the parts */
  const dg_str* workers; /* that have a part */
  size_t worker_count;   /* 0: all workers have, as of each save and load */
  uint64_t keep;         /* so many checkpoints stay in the folder, the newest ones; 0: 3 */
  uint64_t flags;        /* DG_CHECKPOINT_... */
} dg_checkpoint_manager_options;
#define DG_CHECKPOINT_MANAGER_OPTIONS_INIT \
  { sizeof(dg_checkpoint_manager_options), {0, 0}, 0, 0, 0, 0 }
/* A save may lack tensors or optimizers' states that the last checkpoint has (the one that the
 * manager has loaded, until it saves; else the newest), or have those of a worker that was started
 * again since the last save or load and not loaded, or those that a load has left which failed when
 * some of it may have been loaded. Without this flag it is refused: their worker is gone, or a part
 * forgets them, and older checkpoints are removed. */
#define DG_CHECKPOINT_ALLOW_DROPPING UINT64_C(1)

/* Creates the manager, and the folder, if need be; all workers have to see it under this path. It
 * is locked as long as the manager lasts: DG_ABORTED, with host and process, if another manager has
 * it. The worker need not have a part. Waits for the disk. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_manager_create(
    dg_worker* worker, dg_str folder, const dg_checkpoint_manager_options* options,
    dg_checkpoint_manager** out) DG_NOEXCEPT;

/* Saves what all parts have at `step`, which is not negative. Waits until it is durable, at most
 * timeout_ms; nobody may write to the tensors meanwhile, so this is for between two steps. After an
 * error, which names the worker, the checkpoints that were there are still there.
 *
 * DG_FAILED_PRECONDITION, with a list, if it would lack what the last checkpoint has, if a worker
 * has come back since this manager's last save or load (also a load that found no checkpoint) and
 * was not loaded, if its last load has failed when some of it may have been loaded, if replicas
 * differ, and if a worker has no part; DG_INVALID_ARGUMENT if a load would refuse an optimizer's
 * state; DG_ALREADY_EXISTS if somebody else's folder has the name of that step; the error of a
 * save_values. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_manager_save(dg_checkpoint_manager* manager,
                                                        int64_t step,
                                                        int64_t timeout_ms) DG_NOEXCEPT;
/* Waits only until all parts have copied theirs to memory on the CPU, when training may go on. It
 * is then written in the background, and the future, which has no reply, is done when it is
 * durable; cancelling that has no effect. If a save before it is not written yet, waits for that
 * first. timeout_ms is for all of this, until it is durable: what is not written by then fails, and
 * the future with it. The end of the worker makes what is being written fail, and waits for that.
 * Errors as of dg_checkpoint_manager_save, here or as the future's. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_manager_save_async(dg_checkpoint_manager* manager,
                                                              int64_t step, int64_t timeout_ms,
                                                              dg_future** out) DG_NOEXCEPT;

/* Unlike elsewhere, 0 is not the default of `step`: start from the INIT macro. */
typedef struct dg_checkpoint_load_options {
  size_t struct_size;
  int64_t step;       /* which checkpoint; negative: the one that was saved last */
  int64_t timeout_ms; /* 0: no limit */
  uint64_t flags;     /* DG_CHECKPOINT_LOAD_... */
} dg_checkpoint_load_options;
#define DG_CHECKPOINT_LOAD_OPTIONS_INIT \
  { sizeof(dg_checkpoint_load_options), -1, 0, 0 }
/* What is missing in the checkpoint, unexpected in it, of another dtype or shape, or shares memory
 * with what has other values stays as it is, and is listed; of what shares memory the first by its
 * name is loaded. Without this flag it is an error, and nothing is loaded. */
#define DG_CHECKPOINT_LOAD_NOT_STRICT UINT64_C(1)
/* A damaged checkpoint, or one of which a file is not there, is passed over for the one before it.
 * Without this flag it is an error, as is, in any case, a file that cannot be read: it may be good.
 */
#define DG_CHECKPOINT_LOAD_FALL_BACK UINT64_C(2)

/* What was loaded. Immutable. */
typedef struct dg_loaded_checkpoint dg_loaded_checkpoint;

/* Loads onto the workers what their parts ask for, each tensor by its name from whichever worker
 * saved it: so there may be other workers than there were, with other parts of the model, on other
 * devices. Waits. All checksums are verified, on all workers, before anything is loaded; if one is
 * lost after that, or its load_values fails, some may have been loaded.
 *
 * DG_NOT_FOUND only if there is no checkpoint, or none of that step: one may begin at step 0.
 * DG_FAILED_PRECONDITION if a worker has no part; DG_DATA_LOSS if it is damaged, with the file, the
 * tensor, and which step could be loaded instead; DG_INVALID_ARGUMENT with a list of what does not
 * fit; the error of a load_values; what the operating system says of a file that cannot be read. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_manager_load(dg_checkpoint_manager* manager,
                                                        const dg_checkpoint_load_options* options,
                                                        dg_loaded_checkpoint** out) DG_NOEXCEPT;
/* Destroys the manager, and unlocks the folder. Waits for what dg_checkpoint_manager_save_async
 * writes; in the callback of a future or a cancellation, in destructors of user data, and in
 * save_values and load_values of a part, a thread of the library does that. */
DG_API void dg_checkpoint_manager_destroy(dg_checkpoint_manager* manager) DG_NOEXCEPT;

/* The same as dg_checkpoint_manager_load, without a manager and its lock: for a job that loads what
 * another one saves. Of the second options `name` and `workers` count; NULL: all default. */
DG_API DG_MUST_USE dg_error* dg_checkpoint_load(dg_worker* worker, dg_str folder,
                                                const dg_checkpoint_load_options* options,
                                                const dg_checkpoint_manager_options* of,
                                                dg_loaded_checkpoint** out) DG_NOEXCEPT;

/* Returns the step; -1 if `loaded` is not a valid handle. */
DG_API int64_t dg_loaded_checkpoint_step(const dg_loaded_checkpoint* loaded) DG_NOEXCEPT;
/* Returns the folder of the checkpoint that was loaded. It lives as long as `loaded`. */
DG_API dg_str dg_loaded_checkpoint_folder(const dg_loaded_checkpoint* loaded) DG_NOEXCEPT;
/* Return how many texts one of the lists (DG_LOADED_...) has, and one of them: for people, with the
 * name of the tensor or optimizer. It lives as long as `loaded`; empty beyond the last. All lists
 * are empty without DG_CHECKPOINT_LOAD_NOT_STRICT. */
DG_API size_t dg_loaded_checkpoint_count(const dg_loaded_checkpoint* loaded,
                                         uint64_t list) DG_NOEXCEPT;
DG_API dg_str dg_loaded_checkpoint_item(const dg_loaded_checkpoint* loaded, uint64_t list,
                                        size_t index) DG_NOEXCEPT;
enum {
  DG_LOADED_MISSING = 1,    /* in the checkpoint */
  DG_LOADED_UNEXPECTED = 2, /* in the checkpoint: nobody asked for it */
  /* Of another dtype or shape, or shares memory with another tensor that was loaded with other
   * values. */
  DG_LOADED_MISMATCHED = 3
};
DG_API void dg_loaded_checkpoint_destroy(dg_loaded_checkpoint* loaded) DG_NOEXCEPT;

/* --------------------------------------------------------------------------------- Pipelines */

/* A model in stages, which are on several workers, and batches that run through them in
 * micro-batches: while one stage computes one of them, the others compute others.
 * docs/pipelines.md. */

/* What a rank of a pipeline does: a line of its list. Small, for there are many; never grows. */
typedef struct dg_action {
  uint32_t kind; /* DG_ACTION_... */
  uint32_t stage;
  uint32_t micro_batch; /* 0 for a step */
} dg_action;
enum {
  DG_ACTION_FORWARD = 0,
  /* All of the backward; or its two halves: the gradients of what the stage was given, for which
   * the stage before it waits, and those of its parameters, for which nobody does. */
  DG_ACTION_BACKWARD = 1,
  DG_ACTION_BACKWARD_INPUT = 2,
  DG_ACTION_BACKWARD_WEIGHT = 3,
  /* To the rank of the next stage, and from that of the one before. A send does not wait. */
  DG_ACTION_SEND_ACTIVATION = 4,
  DG_ACTION_RECEIVE_ACTIVATION = 5,
  /* To the rank of the stage before, and from that of the next one. */
  DG_ACTION_SEND_GRADIENT = 6,
  DG_ACTION_RECEIVE_GRADIENT = 7,
  DG_ACTION_STEP = 8 /* that of dg_pipeline_stage, of one stage. Of no micro-batch */
};
typedef struct dg_action_list {
  const dg_action* data;
  size_t size;
} dg_action_list;

/* In which order the ranks of a pipeline do what is to be done for one batch, as data. Each rank
 * does the actions of its list one after the other; what comes from another rank it waits for.
 * Fields are only ever added. */
typedef struct dg_schedule_data {
  size_t struct_size;
  uint64_t micro_batches;
  const uint32_t* rank_of_stage; /* by stage. Stage s gives its outputs to stage s + 1 */
  size_t stage_count;
  const dg_action_list* lists; /* by rank */
  size_t rank_count;
  /* How many activations each rank holds at once, at most: of a stage and a micro-batch, from the
   * forward until its backward, or both halves, are done. NULL: nothing is promised. */
  const uint32_t* max_activations;
} dg_schedule_data;
#define DG_SCHEDULE_DATA_INIT \
  { sizeof(dg_schedule_data), 0, 0, 0, 0, 0, 0 }

/* A schedule that keeps what it promises: nothing is missing, there twice, before what it needs,
 * or waits for ever. Immutable. */
typedef struct dg_schedule dg_schedule;

/* Creates a schedule of lists of one's own, which are copied. DG_INVALID_ARGUMENT names the action
 * that is wrong, and why. */
DG_API DG_MUST_USE dg_error* dg_schedule_create(const dg_schedule_data* data, uint64_t flags,
                                                dg_schedule** out) DG_NOEXCEPT;
/* Flags of dg_schedule_create. The lists have no sends and no receives: a send is put behind each
 * action whose result another rank needs, and a receive before each action that needs one. */
#define DG_SCHEDULE_ADD_TRANSFERS UINT64_C(1)
/* The lists have no steps of the optimizer (DG_INVALID_ARGUMENT if they have): that of each stage
 * is put behind the list of its rank. The data may be that of another schedule (dg_schedule_get).
 */
#define DG_SCHEDULE_ADD_STEPS UINT64_C(2)

/* Create the schedules that docs/pipelines.md compares, with one stage on each rank. A stage adds
 * up the gradients of its micro-batches from the first to the last. DG_INVALID_ARGUMENT for 0, and
 * for more than a million micro-batches of stages. */

/* All forwards, and then all backwards. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_gpipe(uint64_t stages, uint64_t micro_batches,
                                                      dg_schedule** out) DG_NOEXCEPT;
/* 1F1B: as few forwards before the first backward as keep all busy, then a backward for each
 * forward. As fast as GPipe, and holds fewer activations. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_one_forward_one_backward(
    uint64_t stages, uint64_t micro_batches, dg_schedule** out) DG_NOEXCEPT;
/* The same with several stages on each rank: stage s is on rank s % ranks. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_interleaved_one_forward_one_backward(
    uint64_t ranks, uint64_t stages_per_rank, uint64_t micro_batches,
    dg_schedule** out) DG_NOEXCEPT;
/* ZB-H1: 1F1B with backward in two halves, the second of which fills what would be idle. The first
 * stage's backward stays whole, as nobody waits for its first half. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_zero_bubble_h1(uint64_t stages,
                                                               uint64_t micro_batches,
                                                               dg_schedule** out) DG_NOEXCEPT;
/* ZB-H2: ZB-H1 with twice as many forwards ahead, so that each rank has work while the first
 * gradients come back, and what comes late holds up less. Holds up to twice as many activations.
 * With fewer than 2 (stages - 1) micro-batches ZB-H1 is the better one, as a rule. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_zero_bubble_h2(uint64_t stages,
                                                               uint64_t micro_batches,
                                                               dg_schedule** out) DG_NOEXCEPT;

/* ZB-H1 is this with one forward ahead for each rank behind a rank, ZB-H2 with two. More fill the
 * time of slower hand-overs, where steps are in flight behind each other (dg_pipeline_start), and
 * hold as many more activations. */
DG_API DG_MUST_USE dg_error* dg_schedule_create_zero_bubble(uint64_t stages, uint64_t micro_batches,
                                                            uint64_t forwards_ahead,
                                                            dg_schedule** out) DG_NOEXCEPT;

/* Returns what the schedule is, which lives as long as it: to change a copy, for instance. NULL if
 * `schedule` is not a valid handle. */
DG_API const dg_schedule_data* dg_schedule_get(const dg_schedule* schedule) DG_NOEXCEPT;

/* Runs the lists as ranks do, and stores when: `time` says how long an action takes, in any unit.
 * Stores when the last rank is through, and, by rank, the sum of the times of its actions and how
 * many activations it holds at once; starts[r] is an array with room for each action of rank r's
 * list. NULL skips one. `time` is called within this call, once for each action. */
DG_API DG_MUST_USE dg_error* dg_schedule_simulate(
    const dg_schedule* schedule, double (*time)(void* user_data, const dg_action* action),
    void* user_data, double* end, double* busy, uint32_t* max_activations,
    double* const* starts) DG_NOEXCEPT;
DG_API void dg_schedule_destroy(dg_schedule* schedule) DG_NOEXCEPT;

/* What a function of a stage gets, of one micro-batch; all of it is borrowed for the call. Fields
 * are only ever added. */
typedef struct dg_micro_batch {
  size_t struct_size; /* as the library knows it */
  uint64_t stage;
  const dg_tensor* const* inputs; /* of forward: what the stage before has given, or the batch's
                                   * part; NULL where there is no tensor. None for a loss */
  size_t input_count;
  const dg_tensor* const* outputs; /* of a loss: what forward has given. None for a forward */
  size_t output_count;
  const dg_tensor* const* targets; /* of a loss. None for a forward */
  size_t target_count;
} dg_micro_batch;

/* An action of a rank that is over, with its times; borrowed for the call. A receive includes the
 * wait for what another rank sends; so does the forward of stage 0, which waits for the batch, and
 * that of the last stage, which waits for the targets. Fields are only ever added. */
typedef struct dg_stage_span {
  size_t struct_size; /* as the library knows it */
  uint64_t rank;
  uint64_t step; /* of the pipeline: the same number on all ranks */
  const dg_action* action;
  int64_t begin_ns; /* since the beginning of 1970 (UTC), by the clock of this machine */
  int64_t end_ns;
} dg_stage_span;

/* What a stage computes. Its functions run on a thread of the library, "dg-stage-N", for each rank
 * of a schedule; of one stage one at a time. They may wait and make calls, as a handler may. An
 * error that they return, which the library takes, ends the step: it keeps its code, and names
 * stage, micro-batch and worker.
 *
 * Forward and loss run in torch's modes (autocast, inference mode) of the thread that called
 * dg_pipeline_train, dg_pipeline_start or dg_pipeline_evaluate, but with the gradient mode that the
 * step needs: on but in dg_pipeline_evaluate. Step and on_action run in the modes of a new thread,
 * without autocast and with gradient mode on: a step that writes to parameters itself turns it off
 * (dg_grad_set_enabled).
 *
 * The tensors that they get come without history, and the graph is the stage's own; it ends with
 * the micro-batch. So a stage must not write to what it is given, nor keep it with its history; nor
 * write again to what it has returned, before the micro-batch's backward has come, or the
 * evaluation is over. */
typedef struct dg_pipeline_stage {
  size_t struct_size;
  uint64_t number; /* in the pipeline, from 0 */
  /* Stores a message, which the library takes, also with an error: its tensors, from the inputs,
   * are what the next stage gets; it has no payload. */
  dg_error* (*forward)(void* user_data, const dg_micro_batch* micro_batch, dg_message** outputs);
  /* Of the last stage: stores the loss of a micro-batch, a tensor of one element, which the library
   * takes, also with an error. With a backward it is real. NULL: none. */
  dg_error* (*loss)(void* user_data, const dg_micro_batch* micro_batch, dg_tensor** loss);
  /* What DG_ACTION_STEP does, where a schedule has it (DG_SCHEDULE_ADD_STEPS; else nothing calls
   * this): with the context of the step, borrowed for the call, which has this stage's gradients: a
   * dg_optimizer_step of a local optimizer, for instance. NULL: none, and a step of such a schedule
   * is refused with DG_FAILED_PRECONDITION. */
  dg_error* (*step)(void* user_data, const dg_context* context);
  void* user_data;
  void (*destroy)(void* user_data);
  /* How many tensors forward takes, and how many targets the loss. With any other number the step
   * fails, and they are not called. DG_ANY_COUNT: any number. */
  int64_t inputs;
  int64_t targets;
  uint64_t flags; /* DG_PIPELINE_STAGE_... */
  /* Parameters that other stages have as well, on whichever worker, each under the same name there:
   * leaves that require grad, by their names. When a rank's backwards are done it waits for those
   * of the other ranks that have one of its names, and each of them has the sum of all their
   * gradients then. Those of one name have the same sizes, dtype and device, and, to stay the same,
   * the same first values and the same optimizer. With steps in flight (dg_pipeline_start) ranks of
   * one worker must not have one tensor for it. */
  const dg_str* tied_names;
  const dg_tensor* const* tied;
  size_t tied_count;
  /* The numbers of the stages to which the last outputs of forward skip, one for each: with {3, 2}
   * the last but one goes straight to stage 3, and the last to stage 2, and the next stage gets
   * those before. Each is later than the next stage; it gets the tensors that skip to it behind
   * those of the stage before it, by the number of the stage that they come from, and they count
   * among its inputs. Their gradients come back as straight. */
  const uint64_t* skips;
  size_t skip_count;
  /* Is told of each action of this stage, after it. NULL: nobody is. dg_worker_start_trace needs
   * none. */
  dg_error* (*on_action)(void* user_data, const dg_stage_span* span);
} dg_pipeline_stage;
#define DG_ANY_COUNT INT64_C(-1)
#define DG_PIPELINE_STAGE_INIT \
  { sizeof(dg_pipeline_stage), 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0 }
/* Forward and loss run a second time, in the backward (activation checkpointing): until then a
 * micro-batch keeps what the stage was given, and no activations. The second run draws the random
 * numbers of the first from torch's default generators; the step fails if another thread of the
 * process has drawn from these meanwhile. */
#define DG_PIPELINE_STAGE_RECOMPUTE UINT64_C(1)

/* The stages of a pipeline that a worker has. */
typedef struct dg_pipeline_stages dg_pipeline_stages;

typedef struct dg_pipeline_stages_options {
  size_t struct_size;
  uint64_t num_threads; /* how many an operator of a stage may use; 0: as many as dg_num_threads()
                         * says on the thread that creates the stages, when it does (a later
                         * dg_set_num_threads does not reach them), but where the machine has
                         * several workers, or this one has several ranks, no more than the
                         * processors give to each rank of each of them */
  /* Averages the gradients of these stages over the replicas of the pipeline, in each
   * dg_pipeline_train: a dg_gradient_averager of the parameters that they train, over the workers
   * that have these stages in each replica; the stages keep it alive. A rank averages when its own
   * backwards are done, while the ranks before it still have some; with one stage it begins in its
   * last backward. All replicas take the same steps: a step that fails on one, once it runs, fails
   * the process group, and with it the step of the others. They go on with new groups, averagers
   * and stages, from the last checkpoint. The worker has one rank of a schedule then, and no other
   * worker of the process has this averager, or the step is refused. NULL: no replicas.
   *
   * A step fails with DG_FAILED_PRECONDITION, and names worker and parameter (by its tied name, or
   * its dtype and shape), if it has a gradient for a parameter that the averager leaves out, or for
   * one of a worker that has no averager while another worker of the pipeline has one: its replicas
   * would drift apart. Frozen parameters need none.
   *
   * Each replica counts the same, however many rows its part of the batch has; so with losses that
   * are means the replicas' parts have to be of one size for the mean of the whole batch. Where
   * they are not, let the loss be the sum over the rows times the number of replicas, divided by
   * the rows of all of them, with DG_REDUCTION_SUM. */
  struct dg_gradient_averager* averager;
} dg_pipeline_stages_options;
#define DG_PIPELINE_STAGES_OPTIONS_INIT \
  { sizeof(dg_pipeline_stages_options), 0, 0 }

/* Lets the pipelines of that name, of whichever worker of the job, use these stages. Takes the
 * user_data of each stage. The stages last until dg_pipeline_stages_destroy, or as long as the
 * worker. DG_ALREADY_EXISTS if the worker has some of that name; DG_INVALID_ARGUMENT for a name of
 * more than 900 bytes or with a "::" in it, for two stages of one number, and for a stage without
 * forward. */
DG_API DG_MUST_USE dg_error* dg_pipeline_stages_create(dg_worker* worker, dg_str name,
                                                       const dg_pipeline_stage* const* stages,
                                                       size_t stage_count,
                                                       const dg_pipeline_stages_options* options,
                                                       dg_pipeline_stages** out) DG_NOEXCEPT;
/* Takes the stages off, and destroys the handle; a step that runs fails with DG_CANCELLED. Waits
 * until none of their functions runs, for at most a minute: what still runs then is logged, and
 * goes on with its user_data, and only the worker's end waits for it. In one of these functions, in
 * the callback of a future and in destructors of user data it does not wait. The worker may have
 * ended before. */
DG_API void dg_pipeline_stages_destroy(dg_pipeline_stages* stages) DG_NOEXCEPT;

/* Runs batches through the stages of a pipeline. */
typedef struct dg_pipeline dg_pipeline;

typedef struct dg_pipeline_options {
  size_t struct_size;
  uint64_t reduction; /* DG_REDUCTION_...: what the gradients of a batch are */
} dg_pipeline_options;
#define DG_PIPELINE_OPTIONS_INIT \
  { sizeof(dg_pipeline_options), 0 }
enum {
  DG_REDUCTION_MEAN = 0, /* each micro-batch's loss counts by its part of the batch: where the loss
                          * is a mean, the sum is that of the whole batch */
  DG_REDUCTION_SUM = 1   /* of the losses as they are */
};

/* Creates a pipeline over the stages of that name, with the worker of each rank of the schedule;
 * one may be there several times, and `worker`, which runs the steps, need not be among them.
 * DG_INVALID_ARGUMENT for another number of workers than the schedule has ranks. */
DG_API DG_MUST_USE dg_error* dg_pipeline_create(dg_worker* worker, dg_str name,
                                                const dg_schedule* schedule, const dg_str* workers,
                                                size_t worker_count,
                                                const dg_pipeline_options* options,
                                                dg_pipeline** out) DG_NOEXCEPT;
DG_API void dg_pipeline_destroy(dg_pipeline* pipeline) DG_NOEXCEPT;

/* What a batch has given. Immutable. */
typedef struct dg_pipeline_result dg_pipeline_result;

typedef struct dg_pipeline_run_options {
  size_t struct_size;
  int64_t timeout_ms; /* 0: as in dg_worker_options */
} dg_pipeline_run_options;
#define DG_PIPELINE_RUN_OPTIONS_INIT \
  { sizeof(dg_pipeline_run_options), 0 }

/* Runs a batch forward and backward. Waits. Afterwards each worker has the gradients of its stages
 * in the context, added to what was there, as after dg_context_backward: for an optimizer, for
 * clipping, for an averager. They are added up by micro-batch, in the order of the backwards in the
 * rank's list.
 *
 * The first dimension of each tensor is the batch; it is cut into as many micro-batches as the
 * schedule has, of which the first may have one element more than the others. The first stage gets
 * the inputs, the last one's loss the targets. DG_INVALID_ARGUMENT for a batch with fewer elements
 * than micro-batches, and for a tensor that requires grad: no gradient goes back to it.
 *
 * An error of a stage keeps its code, and names stage, micro-batch and worker; that of the deadline
 * (DG_DEADLINE_EXCEEDED) what each rank was doing. The first error ends the step on all ranks, and
 * the context is good for dg_context_release only. Besides: DG_FAILED_PRECONDITION while another
 * step runs on one of the stages, of this pipeline or of another (of two that begin at one moment
 * one runs), and for a gradient that replicas do not average (dg_pipeline_stages_options.averager);
 * DG_NOT_FOUND for a stage that its worker does not have; DG_UNAVAILABLE if a worker is lost;
 * DG_CANCELLED by the end of stages or of this worker.
 *
 * Where the schedule has steps of the optimizer (DG_ACTION_STEP), no stage begins its own any more
 * once this has returned an error, and one that was in it has ended; the error says which stages
 * have stepped. It waits for that until the deadline, or, where timeout_ms is 0, for another
 * timeout of dg_worker_options; once the deadline has passed, for 2 seconds. For a worker that has
 * not answered by then, or is lost, the error says that it does not know: a step that was in the
 * middle there goes on. For as long it waits for workers that average over replicas
 * (dg_pipeline_stages_options.averager) to fail their averages; one that has not answered by then
 * is asked again before the next step, which fails if it does not answer then, either. Where a
 * worker did not know the step any more, the next one fails with DG_FAILED_PRECONDITION while that
 * worker still has the averager that it had then: make averager and stages anew. */
DG_API DG_MUST_USE dg_error* dg_pipeline_train(const dg_pipeline* pipeline,
                                               const dg_context* context,
                                               const dg_tensor* const* inputs, size_t input_count,
                                               const dg_tensor* const* targets, size_t target_count,
                                               const dg_pipeline_run_options* options,
                                               dg_pipeline_result** out) DG_NOEXCEPT;

/* A step that was started. The end of its worker ends it; pipeline and context may be destroyed
 * before it. */
typedef struct dg_pipeline_step dg_pipeline_step;

/* Starts a step as dg_pipeline_train does. Waits until all ranks know of it, and not for its end:
 * that is dg_pipeline_step_wait. It may be started while others of this pipeline run, and then
 * comes behind them on each rank: so one rank may begin with it while others are still in the step
 * before, and nobody is idle between the two. A rank goes through its whole list before it begins
 * the next step's. So where the schedule has the optimizer's steps (DG_ACTION_STEP) the gradients
 * and parameters are those of dg_pipeline_train, called once for each batch, to the last bit. Where
 * it has none, each step starts from the parameters as they are then; which is good for gradients
 * that are to be added up (dg_worker_sum_gradients).
 *
 * If a step fails, those that were started behind it fail, too, with DG_FAILED_PRECONDITION or its
 * error; what any of them has done by then its own error says. Nobody may write to the tensors, nor
 * to memory that they were made over, before the step has ended: they are not copied. Keep the
 * context until somebody has waited for the step: with one that is released, as dg_context_destroy
 * does, the gradients are gone, and an optimizer's step that wants them fails.
 * DG_FAILED_PRECONDITION if one that runs has failed already, for a ninth step that nobody has
 * waited for, and while another thread is in this function. */
DG_API DG_MUST_USE dg_error* dg_pipeline_start(const dg_pipeline* pipeline,
                                               const dg_context* context,
                                               const dg_tensor* const* inputs, size_t input_count,
                                               const dg_tensor* const* targets, size_t target_count,
                                               const dg_pipeline_run_options* options,
                                               dg_pipeline_step** out) DG_NOEXCEPT;
/* Waits for the step's end, and stores what dg_pipeline_train does. Once, with an error, too: from
 * then on the handle is good for dg_pipeline_step_destroy only, and this returns
 * DG_FAILED_PRECONDITION; as it does when the worker has ended, where one must not wait, and, with
 * the step as it was, in a function of a stage of a pipeline of this name, for which the step may
 * wait. */
DG_API DG_MUST_USE dg_error* dg_pipeline_step_wait(dg_pipeline_step* step,
                                                   dg_pipeline_result** out) DG_NOEXCEPT;
/* Destroys the handle. Ends the step with DG_CANCELLED, if nobody has waited for it, and those that
 * were started behind it with it; and waits for that as dg_pipeline_step_wait does. In a function
 * of a stage, in the callback of a future and in destructors of user data it does not wait: a
 * thread of the library does. */
DG_API void dg_pipeline_step_destroy(dg_pipeline_step* step) DG_NOEXCEPT;

/* Runs a batch forward alone, without gradients; with losses where there are targets. Waits. Errors
 * as of dg_pipeline_train. */
DG_API DG_MUST_USE dg_error* dg_pipeline_evaluate(
    const dg_pipeline* pipeline, const dg_tensor* const* inputs, size_t input_count,
    const dg_tensor* const* targets, size_t target_count, const dg_pipeline_run_options* options,
    dg_pipeline_result** out) DG_NOEXCEPT;

/* Stores the loss of the batch: the sum of its micro-batches' losses, or their mean (reduction).
 * NULL if there are none: in an evaluation without targets. */
DG_API DG_MUST_USE dg_error* dg_pipeline_result_loss(const dg_pipeline_result* result,
                                                     dg_tensor** out) DG_NOEXCEPT;
/* Stores a message with the loss of each micro-batch. */
DG_API DG_MUST_USE dg_error* dg_pipeline_result_losses(const dg_pipeline_result* result,
                                                       dg_message** out) DG_NOEXCEPT;
/* Returns of how many micro-batches there are outputs: all in an evaluation, else 0. */
DG_API size_t dg_pipeline_result_output_count(const dg_pipeline_result* result) DG_NOEXCEPT;
/* Stores a message with what the last stage has given for one of them. DG_INVALID_ARGUMENT beyond
 * the last. */
DG_API DG_MUST_USE dg_error* dg_pipeline_result_outputs(const dg_pipeline_result* result,
                                                        size_t micro_batch,
                                                        dg_message** out) DG_NOEXCEPT;
DG_API void dg_pipeline_result_destroy(dg_pipeline_result* result) DG_NOEXCEPT;

/* ----------------------------------------------------------------------------- Data parallel */

/* One function on several devices, each with a part of the batch and with the same parameters;
 * backward adds up their gradients. It needs a worker only for a context to go backward in.
 * docs/data_parallel.md. */
typedef struct dg_data_parallel dg_data_parallel;

typedef struct dg_data_parallel_options {
  size_t struct_size;
  const dg_str* devices;           /* "cpu", "cuda:1"; one may be there several times */
  size_t device_count;             /* 0: all CUDA devices */
  dg_str output_device;            /* empty: the first of the devices */
  int64_t dim;                     /* along which inputs are split and outputs put together */
  const dg_tensor* const* buffers; /* tensors that the function writes to, as batch norm does to
                                    * its statistics; those of replica 0 are kept */
  size_t buffer_count;
  uint64_t bucket_bytes; /* the largest bucket of gradients that are added at once; 0: 25 MiB */
  int64_t timeout_ms;    /* of a reduction between GPUs; 0: ten minutes */
} dg_data_parallel_options;
#define DG_DATA_PARALLEL_OPTIONS_INIT \
  { sizeof(dg_data_parallel_options), 0, 0, {0, 0}, 0, 0, 0, 0, 0 }

/* What the function gets for one replica; all of it is borrowed for the call. Fields are only
 * ever added. */
typedef struct dg_replica {
  size_t struct_size;                 /* as the library knows it */
  uint64_t index;                     /* in the list of devices */
  dg_str device;                      /* is the thread's current device */
  const dg_tensor* const* parameters; /* those of dg_data_parallel_create, on the device */
  size_t parameter_count;
  const dg_tensor* const* buffers;
  size_t buffer_count;
  const dg_tensor* const* inputs; /* its part of each; NULL where none was given */
  size_t input_count;
  size_t output_count; /* what dg_data_parallel_forward asks for */
} dg_replica;

/* The function. It stores output_count outputs, NULL for none, which the library takes, also
 * with an error; and returns NULL, or an error, which the library takes. Runs for all replicas
 * at the same time, each on a thread of its own, with the grad mode of dg_data_parallel_forward;
 * may wait. */
typedef dg_error* (*dg_forward)(void* user_data, const dg_replica* replica, dg_tensor** outputs);

/* Creates replicas, threads and buckets, which last until it is destroyed. Parameters and
 * buffers lie on one device, which need not be one of the list, and stay the caller's tensors:
 * replicas follow their values. Takes `user_data`. */
DG_API DG_MUST_USE dg_error* dg_data_parallel_create(const dg_tensor* const* parameters,
                                                     size_t parameter_count,
                                                     const dg_data_parallel_options* options,
                                                     dg_forward forward, void* user_data,
                                                     void (*destroy)(void* user_data),
                                                     dg_data_parallel** out) DG_NOEXCEPT;

/* Splits the inputs, runs the function, and puts its outputs together in
 * outputs[0..output_count). All inputs have to give the same number of parts; a batch smaller
 * than the list of devices leaves some of them idle. An input or output that is NULL stays NULL.
 * Waits for all replicas. Their first error, by the list, keeps its code and names replica and
 * device. DG_FAILED_PRECONDITION while another forward of it is in flight. */
DG_API DG_MUST_USE dg_error* dg_data_parallel_forward(const dg_data_parallel* data_parallel,
                                                      const dg_tensor* const* inputs,
                                                      size_t input_count, dg_tensor** outputs,
                                                      size_t output_count) DG_NOEXCEPT;
DG_API void dg_data_parallel_destroy(dg_data_parallel* data_parallel) DG_NOEXCEPT;

/* The steps of data parallel, each by itself. Autograd records them. */

/* Splits a tensor along `dim`: part i, of sizes[i], is on devices[i]; without sizes (NULL) the
 * parts are as equal as possible. A short `dim` gives fewer parts, and one at least. outs has room
 * for device_count, and gets NULL beyond the last part; *part_count says how many there are.
 *
 * Errors of this and of the next three: DG_INVALID_ARGUMENT for no device, or one that is not
 * there, and for a `dim`, sizes or shapes that do not fit; DG_RESOURCE_EXHAUSTED if memory is
 * out. */
DG_API DG_MUST_USE dg_error* dg_scatter(const dg_tensor* tensor, const dg_str* devices,
                                        size_t device_count, int64_t dim, const int64_t* sizes,
                                        dg_tensor** outs, size_t* part_count) DG_NOEXCEPT;

/* Concatenates tensors along `dim`, on a device (empty: that of the first tensor). Tensors of no
 * dimensions give a vector. */
DG_API DG_MUST_USE dg_error* dg_gather(const dg_tensor* const* tensors, size_t tensor_count,
                                       dg_str device, int64_t dim, dg_tensor** out) DG_NOEXCEPT;

/* Copies tensors to each device, in few large pieces: outs[d * tensor_count + k] is the copy of
 * tensors[k] on devices[d]. The tensors lie on one device; a NULL stays NULL. */
DG_API DG_MUST_USE dg_error* dg_broadcast(const dg_tensor* const* tensors, size_t tensor_count,
                                          const dg_str* devices, size_t device_count,
                                          dg_tensor** outs) DG_NOEXCEPT;

/* Adds up lists of tensors, the reverse of dg_broadcast: outs[k] is the sum of all tensors[l *
 * tensor_count + k], on a device (empty: that of the first tensor). Each list of tensor_count
 * tensors lies on one device. A NULL counts as zeros; a sum of NULLs is NULL. */
DG_API DG_MUST_USE dg_error* dg_reduce_add(const dg_tensor* const* tensors, size_t list_count,
                                           size_t tensor_count, dg_str device,
                                           dg_tensor** outs) DG_NOEXCEPT;

/* ---------------------------------------------------------------------------- Process groups */

/* Processes that compute the same thing together, each with its own part of the data. Each is
 * one rank of the group, and all call the same functions of it in the same order. After an
 * error, but for DG_INVALID_ARGUMENT and one that a function returns before anything begins, all
 * later calls return that error: create a new group. docs/data_parallel.md, "Across processes". */
typedef struct dg_process_group dg_process_group;

typedef struct dg_process_group_options {
  size_t struct_size;
  dg_str name;             /* unique among the groups of a job at a time; empty: "default" */
  uint32_t rank;           /* in [0, size) */
  uint32_t size;           /* 0: the group is all workers of the job, each by its rank */
  dg_str backend;          /* "gloo", for the CPU; "nccl", in builds with CUDA; empty: "gloo" */
  dg_str host;             /* the address, name or interface for Gloo to listen on; empty: that of
                            * the worker. With the worker's key or certificates, which the group
                            * takes, what Gloo sends is encrypted, but not what NCCL sends.
                            * docs/security.md */
  int64_t timeout_ms;      /* of each collective; 0: ten minutes */
  int64_t join_timeout_ms; /* for all ranks to join; 0: ten minutes */
} dg_process_group_options;
#define DG_PROCESS_GROUP_OPTIONS_INIT \
  { sizeof(dg_process_group_options), {0, 0}, 0, 0, {0, 0}, {0, 0}, 0, 0 }

/* Creates the group. Its ranks find each other through the worker's job, and do not need the
 * worker afterwards. Waits until all ranks have called it; DG_DEADLINE_EXCEEDED names those that
 * have not. */
DG_API DG_MUST_USE dg_error* dg_process_group_create(dg_worker* worker,
                                                     const dg_process_group_options* options,
                                                     dg_process_group** out) DG_NOEXCEPT;
/* The group ends with the last of its handle, its averagers, and the stages that have one of them.
 * That waits for collectives in flight, each until its time-out, and with NCCL for ranks on other
 * machines, for a minute at most; in the callback of a future or a cancellation, and in destructors
 * of user data, a thread of the library does that. */
DG_API void dg_process_group_destroy(dg_process_group* group) DG_NOEXCEPT;

/* Return 0 if `group` is not a valid handle. */
DG_API uint32_t dg_process_group_rank(const dg_process_group* group) DG_NOEXCEPT;
DG_API uint32_t dg_process_group_size(const dg_process_group* group) DG_NOEXCEPT;

/* Averages in place (an all-reduce): each tensor becomes the average of those of all ranks,
 * which have to have the same shapes and dtypes (this is not checked). Waits for all ranks.
 * DG_INVALID_ARGUMENT, before anything begins, unless all are of DG_FLOAT16, 32 or 64,
 * DG_BFLOAT16, or DG_COMPLEX64 or 128. */
DG_API DG_MUST_USE dg_error* dg_process_group_average(dg_process_group* group,
                                                      const dg_tensor* const* tensors,
                                                      size_t tensor_count) DG_NOEXCEPT;
/* Broadcasts in place: each tensor, of any dtype, becomes that of the rank `root`. Otherwise as
 * dg_process_group_average. */
DG_API DG_MUST_USE dg_error* dg_process_group_broadcast(dg_process_group* group,
                                                        const dg_tensor* const* tensors,
                                                        size_t tensor_count,
                                                        uint32_t root) DG_NOEXCEPT;

/* Tells the group that this rank cannot go on. All later calls of the group here fail with
 * `code` and a message that contains `why`, those in flight end, and the other ranks fail with
 * DG_UNAVAILABLE and `why`, at once, or with NCCL within a second or two. The first error of a
 * group wins. Codes as for dg_error_create. Waits for the job's store, which tells the others; some
 * seconds at most. */
DG_API DG_MUST_USE dg_error* dg_process_group_fail(dg_process_group* group, dg_code code,
                                                   dg_str why) DG_NOEXCEPT;

/* Averages the gradients of a list of parameters over the ranks of a group, step by step: a
 * bucketed all-reduce, as in PyTorch's DistributedDataParallel. */
typedef struct dg_gradient_averager dg_gradient_averager;

typedef struct dg_gradient_averager_options {
  size_t struct_size;
  uint64_t flags;                  /* DG_GRADIENT_AVERAGER_... */
  uint64_t bucket_bytes;           /* the largest bucket of gradients; 0: 25 MiB */
  const dg_tensor* const* buffers; /* the model's other tensors; see dg_gradient_averager_create */
  size_t buffer_count;
} dg_gradient_averager_options;
#define DG_GRADIENT_AVERAGER_OPTIONS_INIT \
  { sizeof(dg_gradient_averager_options), 0, 0, 0, 0 }
/* Divide by the number of ranks that have not joined (dg_gradient_averager_join), rather than by
 * all. */
#define DG_GRADIENT_AVERAGER_DIVIDE_BY_ACTIVE UINT64_C(1)

/* Creates an averager, with the same parameters and buffers on every rank but for their values,
 * which become those of rank 0. A parameter that does not require grad now (a frozen one) is left
 * out of all averages; once it requires grad averages fail on every rank, with an error that names
 * it. DG_INVALID_ARGUMENT, on every rank, names the first tensor that differs. Keeps the group
 * alive. Waits for all ranks. */
DG_API DG_MUST_USE dg_error* dg_gradient_averager_create(
    dg_process_group* group, const dg_tensor* const* parameters, size_t parameter_count,
    const dg_gradient_averager_options* options, dg_gradient_averager** out) DG_NOEXCEPT;
/* Waits as dg_process_group_destroy does. */
DG_API void dg_gradient_averager_destroy(dg_gradient_averager* averager) DG_NOEXCEPT;

/* Averages the gradients that a context has for the parameters, between its backward and the
 * step of an optimizer; each rank has a context of its own. A parameter for which no rank has a
 * gradient is left out. Waits for all ranks. */
DG_API DG_MUST_USE dg_error* dg_gradient_averager_average(dg_gradient_averager* averager,
                                                          const dg_context* context) DG_NOEXCEPT;
/* Makes the averages of a context begin during its backward, as the gradients come;
 * dg_gradient_averager_average then ends them. Call it before that backward, which has to be the
 * context's only one; nothing else may change the gradients in between. Other ranks need not do
 * the same. An averager has one such context at a time, and a context one such averager: any
 * other average, and the context's release, abandons this one, which is an error of all ranks if
 * its averages have begun. Waits for an average that runs on another thread. */
DG_API DG_MUST_USE dg_error* dg_gradient_averager_average_in_backward(
    dg_gradient_averager* averager, const dg_context* context) DG_NOEXCEPT;

/* Takes part in the next dg_gradient_averager_average of the other ranks, for a rank that has run
 * out of data while others have not. It has a context of its own, which has no gradients of the
 * parameters. Waits for all ranks.
 *
 * `others_go_on` becomes true if the others go on: the context then has the averages, and an
 * optimizer of this rank takes the same step with them as those of the others do, so that it
 * keeps the same state. It becomes false when all ranks have called this; they then have the
 * parameters and buffers of the lowest rank that was the last to go on. DG_FAILED_PRECONDITION,
 * before anything begins, if the context has gradients and `flags` lacks
 * DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS. */
DG_API DG_MUST_USE dg_error* dg_gradient_averager_join(dg_gradient_averager* averager,
                                                       const dg_context* context, uint64_t flags,
                                                       bool* others_go_on) DG_NOEXCEPT;
/* Flag of dg_gradient_averager_join: the context has the gradients of earlier averages, as those of
 * the other ranks have. For a step's second average and those after it. */
#define DG_GRADIENT_AVERAGER_JOIN_KEEP_GRADIENTS UINT64_C(1)

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DISTGRAD_DISTGRAD_H_ */
