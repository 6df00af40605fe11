// Creates, imports, exports and describes tensors; sets torch's modes of a thread.
#include <ATen/Context.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"
#include "core/tensor/extent.h"

// ATen/DLConvertor.h declares these too, and with them all operators.
namespace at {
TORCH_API DLManagedTensorVersioned* toDLPackVersioned(const Tensor& src);
TORCH_API Tensor fromDLPackVersioned(DLManagedTensorVersioned* src,
                                     std::function<void(void*)> deleter);
}  // namespace at

namespace distgrad {
namespace {

constexpr size_t kMaxDims = 64;

absl::StatusOr<at::ScalarType> ToScalarType(dg_dtype dtype) {
  switch (dtype) {
    case DG_UINT8:
    case DG_INT8:
    case DG_INT16:
    case DG_INT32:
    case DG_INT64:
    case DG_FLOAT16:
    case DG_FLOAT32:
    case DG_FLOAT64:
    case DG_COMPLEX32:
    case DG_COMPLEX64:
    case DG_COMPLEX128:
    case DG_BOOL:
    case DG_BFLOAT16:
    case DG_FLOAT8_E5M2:
    case DG_FLOAT8_E4M3FN:
    case DG_UINT16:
    case DG_UINT32:
    case DG_UINT64:
      return static_cast<at::ScalarType>(dtype);
    default:
      return absl::InvalidArgumentError(absl::StrCat("there is no dtype ", dtype));
  }
}

// Sizes and strides that no one has to fear to multiply. The strides may be NULL.
absl::Status CheckLayout(const int64_t* shape, const int64_t* strides, size_t dims,
                         size_t element_bytes) {
  if (dims > kMaxDims) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor has ", kMaxDims, " dimensions at most, not ", dims));
  }
  if (dims > 0 && shape == nullptr) return absl::InvalidArgumentError("shape is NULL");
  int64_t count = static_cast<int64_t>(element_bytes);
  int64_t reach = static_cast<int64_t>(element_bytes);
  bool fits = true;
  for (size_t i = 0; i < dims; ++i) {
    if (shape[i] < 0 || (strides != nullptr && strides[i] < 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("dimension ", i, " has a negative size or stride"));
    }
    int64_t step = 0;
    fits = fits && !__builtin_mul_overflow(count, std::max<int64_t>(shape[i], 1), &count);
    if (strides != nullptr && shape[i] > 1) {
      fits = fits && !__builtin_mul_overflow(strides[i], shape[i] - 1, &step) &&
             !__builtin_mul_overflow(step, static_cast<int64_t>(element_bytes), &step) &&
             !__builtin_add_overflow(reach, step, &reach);
    }
  }
  if (!fits) return absl::InvalidArgumentError("a tensor of more than 2^63 bytes");
  return absl::OkStatus();
}

at::IntArrayRef ToArrayRef(const int64_t* numbers, size_t count) {
  return count == 0 ? at::IntArrayRef() : at::IntArrayRef(numbers, count);
}

absl::Status CheckPlain(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested() ||
      !tensor.has_storage()) {
    return absl::FailedPreconditionError(
        "the tensor has no plain memory: it is sparse, nested, quantized, or opaque");
  }
  if (!tensor.is_cpu()) {
    return absl::FailedPreconditionError(absl::StrCat("the tensor is on ", tensor.device().str(),
                                                      ", and not in the CPU's memory: copy it"));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    return absl::FailedPreconditionError(
        "the tensor is a conjugate or negative view: resolve it first, with aten::resolve_conj or "
        "aten::resolve_neg");
  }
  if (tensor._is_zerotensor()) {
    return absl::FailedPreconditionError(
        "the tensor's elements are all zero, and nowhere in memory: make them, with aten::zeros");
  }
  // torch's internal steps can make such.
  if (!IsInMemory(tensor)) {
    return absl::FailedPreconditionError("the tensor's memory is too small for its elements");
  }
  return absl::OkStatus();
}

// -1 along a dimension of a nested tensor that has not one size.
int64_t SizeAlong(const at::Tensor& tensor, int64_t dim) {
  if (!tensor.is_nested()) return tensor.size(dim);
  return at::native::get_nested_tensor_impl(tensor)->opt_size(dim).value_or(-1);
}

// torch's word for it, kept for ever: there are few devices.
dg_str DeviceName(const at::Device& device) {
  if (device.is_cpu()) return ToStr("cpu");
  constexpr int kTypes = at::COMPILE_TIME_MAX_DEVICE_TYPES;
  constexpr int kIndexes = 129;  // -1 to 127
  static auto& names = *new std::array<std::string, size_t{kTypes} * kIndexes>([] {
    std::array<std::string, size_t{kTypes} * kIndexes> made;
    for (int type = 0; type < kTypes; ++type) {
      for (int i = 0; i < kIndexes; ++i) {
        made[type * kIndexes + i] =
            absl::StrCat(at::DeviceTypeName(static_cast<at::DeviceType>(type), true),
                         i == 0 ? "" : absl::StrCat(":", i - 1));
      }
    }
    return made;
  }());
  return ToStr(names[static_cast<int>(device.type()) * kIndexes + device.index() + 1]);
}

// What dg_tensor_to_dlpack gives out: torch's export, by whose deleter ImportDlpack() knows it
// again.
struct Export {
  explicit Export(const at::Tensor& exported)
      : tensor(exported), of_torch(at::toDLPackVersioned(exported)), managed(*of_torch) {
    managed.manager_ctx = this;
    managed.deleter = End;
  }
  ~Export() { of_torch->deleter(of_torch); }
  Export(const Export&) = delete;
  Export& operator=(const Export&) = delete;
  static void End(DLManagedTensorVersioned* ended) {
    delete static_cast<Export*>(ended->manager_ctx);
  }

  const at::Tensor tensor;
  DLManagedTensorVersioned* const of_torch;
  DLManagedTensorVersioned managed;
};

absl::StatusOr<at::Tensor> ImportDlpack(DLManagedTensorVersioned* managed) {
  // Whatever happens from here on, the deleter runs once: when the last copy of this is gone.
  const std::shared_ptr<DLManagedTensorVersioned> owner(managed,
                                                        [](DLManagedTensorVersioned* ended) {
                                                          if (ended->deleter == nullptr) return;
                                                          NoWaitScope scope;
                                                          ended->deleter(ended);
                                                        });
  if (managed->version.major != DLPACK_MAJOR_VERSION) {
    return absl::UnimplementedError(
        absl::StrCat("DLPack ", managed->version.major, ", not ", DLPACK_MAJOR_VERSION));
  }
  if (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) {
    return absl::FailedPreconditionError(
        "the memory is marked read-only, and operators could write to it: copy it");
  }
  const DLTensor& tensor = managed->dl_tensor;
  if (tensor.device.device_type != kDLCPU) {
    return absl::UnimplementedError(absl::StrCat(
        "DLPack memory of device type ", tensor.device.device_type, "; only the CPU's is taken"));
  }
  if (tensor.dtype.lanes != 1 || tensor.dtype.bits > 128) {
    return absl::InvalidArgumentError("a DLPack dtype that torch lacks");
  }
  const auto dims = static_cast<size_t>(std::max(tensor.ndim, -1));
  DG_RETURN_IF_ERROR(
      CheckLayout(tensor.shape, tensor.strides, dims, std::max(1, (tensor.dtype.bits + 7) / 8)));
  const bool empty = std::find(tensor.shape, tensor.shape + dims, 0) != tensor.shape + dims;
  if (tensor.data == nullptr && !empty) {
    return absl::InvalidArgumentError("the DLPack tensor has elements, and its data is NULL");
  }
  // One of this library's own would get a version counter beside that of the exported tensor:
  // autograd would not notice what is written to what a graph has saved, indices for instance.
  if (managed->deleter == Export::End) return static_cast<Export*>(managed->manager_ctx)->tensor;
  // torch takes no notice of the offset.
  DLManagedTensorVersioned from_first = *managed;
  from_first.dl_tensor.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  from_first.dl_tensor.byte_offset = 0;
  try {
    return at::fromDLPackVersioned(&from_first, [owner](void*) {});
  } catch (...) {
    // There is nothing left to go wrong but the dtype.
    return absl::InvalidArgumentError(StatusFromException(std::current_exception()).message());
  }
}

}  // namespace

absl::StatusOr<std::vector<at::Tensor>> PinTensors(const dg_tensor* const* handles, size_t count,
                                                   bool allow_null, absl::string_view name) {
  DG_RETURN_IF_ERROR(CheckArray(handles, count, name));
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (handles[i] == nullptr && allow_null) {
      tensors.emplace_back();
      continue;
    }
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned,
                        PinElement<TensorObject>(handles, i, name));
    tensors.push_back(pinned->tensor);
  }
  return tensors;
}

absl::StatusOr<c10::Device> ToDevice(dg_str name, absl::string_view what) {
  DG_ASSIGN_OR_RETURN(const std::string text, FromStr(name, what));
  try {
    return c10::Device(text);
  } catch (...) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": there is no device '", text, "'; one is 'cpu' or 'cuda:1'"));
  }
}

dg_tensor* NewTensorHandle(const at::Tensor& tensor) {
  return tensor.defined() ? NewHandle<TensorObject>(tensor) : nullptr;
}

std::vector<OwnedHandle<TensorObject>> NewTensorHandles(const std::vector<at::Tensor>& tensors) {
  std::vector<OwnedHandle<TensorObject>> handles;
  handles.reserve(tensors.size());  // before there is one that its place would have to keep
  for (const at::Tensor& tensor : tensors) handles.emplace_back(NewTensorHandle(tensor));
  return handles;
}

}  // namespace distgrad

using namespace distgrad;

namespace {

// What `get` gives for the tensor, or `fallback` where it is not a valid handle.
template <typename T, typename F>
T Ask(const dg_tensor* tensor, T fallback, F&& get) noexcept {
  return GuardValue<T>(fallback, [&]() -> T {
    absl::StatusOr<Pinned<TensorObject>> pinned = Pin<TensorObject>(tensor, "tensor");
    return pinned.ok() ? get((*pinned)->tensor) : fallback;
  });
}

}  // namespace

extern "C" {

dg_error* dg_tensor_from_data(const void* data, dg_dtype dtype, const int64_t* shape,
                              size_t dim_count, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(dtype));
    DG_RETURN_IF_ERROR(CheckLayout(shape, nullptr, dim_count, c10::elementSize(type)));
    const at::Tensor tensor = at::empty(ToArrayRef(shape, dim_count), type);
    DG_RETURN_IF_ERROR(CheckArray(data, tensor.nbytes(), "data"));
    if (tensor.nbytes() > 0) std::memcpy(tensor.data_ptr(), data, tensor.nbytes());
    *out = NewTensorHandle(tensor);
    return absl::OkStatus();
  });
}

dg_error* dg_tensor_from_memory(void* data, dg_dtype dtype, const int64_t* shape,
                                const int64_t* strides, size_t dim_count, void* user_data,
                                void (*destroy)(void* user_data), dg_tensor** out) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const at::ScalarType type, ToScalarType(dtype));
    DG_RETURN_IF_ERROR(CheckLayout(shape, strides, dim_count, c10::elementSize(type)));
    const at::IntArrayRef sizes = ToArrayRef(shape, dim_count);
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    DG_RETURN_IF_ERROR(CheckArray(data, static_cast<size_t>(count), "data"));
    auto owner = std::make_shared<UserData>(std::move(taken));
    const auto end = [owner = std::move(owner)](void*) {};
    const at::TensorOptions options(type);
    *out = NewTensorHandle(strides == nullptr
                               ? at::from_blob(data, sizes, end, options, at::Device(at::kCPU))
                               : at::from_blob(data, sizes, ToArrayRef(strides, dim_count), end,
                                               options, at::Device(at::kCPU)));
    return absl::OkStatus();
  });
}

dg_error* dg_tensor_from_dlpack(DLManagedTensorVersioned* managed, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    if (managed == nullptr) return absl::InvalidArgumentError("managed is NULL");
    DG_ASSIGN_OR_RETURN(const at::Tensor tensor, ImportDlpack(managed));
    DG_RETURN_IF_ERROR(CheckOut(out));
    *out = NewTensorHandle(tensor);
    return absl::OkStatus();
  });
}

dg_error* dg_tensor_to_dlpack(const dg_tensor* tensor, DLManagedTensorVersioned** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    if (pinned->tensor.requires_grad()) {
      return absl::FailedPreconditionError("the tensor requires grad: detach it first");
    }
    DG_RETURN_IF_ERROR(CheckPlain(pinned->tensor));
    // One that is the export's alone, and stays as it is.
    *out = &std::make_unique<Export>(pinned->tensor.detach()).release()->managed;
    return absl::OkStatus();
  });
}

void* dg_tensor_torch(const dg_tensor* tensor) noexcept {
  return Ask<void*>(tensor, nullptr,
                    [](const at::Tensor& t) { return const_cast<at::Tensor*>(&t); });
}

dg_error* dg_tensor_from_torch(const void* torch_tensor, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    const auto* tensor = static_cast<const at::Tensor*>(torch_tensor);
    if (tensor == nullptr || !tensor->defined()) {
      return absl::InvalidArgumentError("torch_tensor is NULL, or an at::Tensor that is undefined");
    }
    *out = NewTensorHandle(*tensor);
    return absl::OkStatus();
  });
}

dg_error* dg_tensor_clone(const dg_tensor* tensor, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    *out = NewTensorHandle(pinned->tensor);
    return absl::OkStatus();
  });
}

dg_error* dg_tensor_detach(const dg_tensor* tensor, dg_tensor** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    *out = NewTensorHandle(pinned->tensor.detach());
    return absl::OkStatus();
  });
}

void dg_tensor_destroy(dg_tensor* tensor) noexcept { DestroyHandle<TensorObject>(tensor); }

dg_dtype dg_tensor_dtype(const dg_tensor* tensor) noexcept {
  return Ask<dg_dtype>(tensor, -1,
                       [](const at::Tensor& t) { return static_cast<dg_dtype>(t.scalar_type()); });
}
size_t dg_tensor_dim_count(const dg_tensor* tensor) noexcept {
  return Ask<size_t>(tensor, 0, [](const at::Tensor& t) { return static_cast<size_t>(t.dim()); });
}
dg_error* dg_tensor_layout(const dg_tensor* tensor, int64_t* shape, int64_t* strides,
                           size_t capacity, size_t* dim_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(dim_count, "dim_count"));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    const at::Tensor& t = pinned->tensor;
    const auto dims = static_cast<size_t>(t.dim());
    if (strides != nullptr && (t.layout() != at::kStrided || t.is_nested())) {
      return absl::FailedPreconditionError("the tensor has no strides: it is sparse, or nested");
    }
    *dim_count = dims;
    if ((shape != nullptr || strides != nullptr) && capacity < dims) {
      return absl::OutOfRangeError(absl::StrCat(
          "the tensor has ", dims, " dimensions, more than the capacity of ", capacity));
    }
    for (size_t i = 0; i < dims; ++i) {
      const auto dim = static_cast<int64_t>(i);
      if (shape != nullptr) shape[i] = SizeAlong(t, dim);
      if (strides != nullptr) strides[i] = t.stride(dim);
    }
    return absl::OkStatus();
  });
}
int64_t dg_tensor_element_count(const dg_tensor* tensor) noexcept {
  return Ask<int64_t>(tensor, 0, [](const at::Tensor& t) { return t.numel(); });
}
dg_str dg_tensor_device(const dg_tensor* tensor) noexcept {
  return Ask<dg_str>(tensor, ToStr(""), [](const at::Tensor& t) { return DeviceName(t.device()); });
}

dg_error* dg_tensor_data(const dg_tensor* tensor, void** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    DG_RETURN_IF_ERROR(CheckPlain(pinned->tensor));
    *out = pinned->tensor.data_ptr();
    return absl::OkStatus();
  });
}

bool dg_tensor_requires_grad(const dg_tensor* tensor) noexcept {
  return Ask<bool>(tensor, false, [](const at::Tensor& t) { return t.requires_grad(); });
}

dg_error* dg_tensor_require_grad(dg_tensor* tensor) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned, Pin<TensorObject>(tensor, "tensor"));
    const at::Tensor& t = pinned->tensor;
    if (!t.is_leaf()) {
      return absl::FailedPreconditionError("the tensor was computed: only a leaf can require grad");
    }
    if (!t.is_floating_point() && !t.is_complex()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a tensor of dtype ", c10::toString(t.scalar_type()), " has no gradient"));
    }
    if (!t.requires_grad()) t.set_requires_grad(true);
    return absl::OkStatus();
  });
}

bool dg_grad_set_enabled(bool enabled) noexcept {
  const bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

bool dg_grad_enabled(void) noexcept { return at::GradMode::is_enabled(); }

dg_error* dg_set_num_threads(uint32_t count) noexcept {
  return Guard([&]() -> absl::Status {
    constexpr uint32_t kMost = 1024;
    if (count == 0 || count > kMost) {
      return absl::InvalidArgumentError(
          absl::StrCat("the number of threads is ", count, ", and has to be in [1, ", kMost, "]"));
    }
    at::set_num_threads(static_cast<int>(count));
    return absl::OkStatus();
  });
}

uint32_t dg_num_threads(void) noexcept {
  return GuardValue<uint32_t>(0, [] { return static_cast<uint32_t>(at::get_num_threads()); });
}

dg_error* dg_manual_seed(uint64_t seed) noexcept {
  return Guard([&]() -> absl::Status {
    at::manual_seed(seed);
    return absl::OkStatus();
  });
}

}  // extern "C"
