// Writes a message into a packet: small tensors as bytes, large ones as segments.
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/gpu_streams.h"
#include "core/tensor/graph_capture.h"
#include "core/tensor/message_codec.h"
#include "core/tensor/message_format.h"

namespace distgrad {
namespace {

using namespace internal;  // NOLINT: the format is ours

// What an ordinary tensor has, of the CPU and of a GPU. One with any key more is not just its
// bytes.
constexpr c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView});
constexpr c10::DispatchKeySet kPlainGpuKeys({c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA,
                                             c10::DispatchKey::AutocastCUDA,
                                             c10::DispatchKey::ADInplaceOrView});

bool IsPlain(const c10::TensorImpl& impl, c10::DispatchKeySet keys = kPlainKeys) {
  return (impl.key_set() | keys) == keys && impl.has_storage() &&
         !impl.has_symbolic_sizes_strides();
}

bool HasContiguousStrides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

// A tensor of its elements and nothing else, that stands for `tensor`: in CPU memory, or if
// `stays`, on the GPU that it is on.
absl::StatusOr<at::Tensor> ToPlain(const at::Tensor& tensor, bool stays = false) {
  at::Tensor plain = tensor;
  if (plain._is_zerotensor()) plain = at::zeros(plain.sizes(), plain.options());
  if (plain.is_conj()) plain = plain.resolve_conj();
  if (plain.is_neg()) plain = plain.resolve_neg();
  if (!plain.is_cpu() && !stays) plain = CopyTo(plain, at::kCPU);
  if (IsPlain(*plain.unsafeGetTensorImpl(), stays ? kPlainGpuKeys : kPlainKeys)) return plain;
  return absl::UnimplementedError(
      absl::StrCat("a tensor of this kind cannot be sent: ", plain.toString()));
}

void AppendHead(const Head& head, at::IntArrayRef sizes, WireWriter& writer) {
  writer.Raw(&head, kHeadBytes);
  for (int64_t size : sizes) writer.I64(size);
}

// `tensor` is plain; `head` has the device that it came from.
absl::Status AppendStrided(const at::Tensor& tensor, const Head& origin, bool contiguous,
                           Packet* packet) {
  Head head = origin;
  at::Tensor copy;
  const at::Tensor* source = &tensor;
  int64_t elements = tensor.numel();
  if (elements != 0 && !HasContiguousStrides(tensor.sizes(), tensor.strides())) {
    std::optional<int64_t> dense = DenseElements(tensor.sizes(), tensor.strides());
    if (contiguous || !dense.has_value()) {
      copy = tensor.contiguous(contiguous ? at::MemoryFormat::Contiguous
                                          : tensor.suggest_memory_format());
      source = &copy;
    } else {
      elements = *dense;
    }
    // One that is to be contiguous is, also where a dimension of one element has another stride.
    if (!contiguous && !HasContiguousStrides(source->sizes(), source->strides())) {
      head.flags |= kStrides;
    }
  }
  const size_t item_size = source->element_size();
  const size_t bytes = static_cast<size_t>(elements) * item_size;
  const size_t offset = static_cast<size_t>(source->storage_offset()) * item_size;
  if (bytes != 0 && offset + bytes > source->storage().nbytes()) {
    return absl::InvalidArgumentError("a tensor is larger than its storage, which was resized");
  }
  head.form = kStrided;
  head.dtype = static_cast<uint8_t>(source->scalar_type());
  head.dims = static_cast<uint8_t>(source->dim());
  if (bytes > kInlineBytes) {
    head.flags |= kInSegment;
  } else if (!source->is_cpu()) {
    return AppendStrided(CopyTo(tensor, at::kCPU), origin, contiguous, packet);
  }

  WireWriter writer(&packet->bytes);
  AppendHead(head, source->sizes(), writer);
  if ((head.flags & kStrides) != 0) {
    // Where the size is 1 the stride means nothing, and may be larger than the tensor.
    for (int64_t stride : source->strides()) writer.I64(std::min(stride, elements));
  }
  const auto* data = static_cast<const char*>(source->const_data_ptr());
  if ((head.flags & kInSegment) == 0) {
    writer.Raw(data, bytes);
    return absl::OkStatus();
  }
  Segment segment;
  // The storage and not the tensor, which would keep its whole graph alive.
  segment.owner = std::make_shared<c10::Storage>(source->storage());
  segment.data = reinterpret_cast<uint8_t*>(const_cast<char*>(data));
  segment.size = bytes;
  if (!source->is_cpu()) {
    segment.device = source->device().index();
    segment.target = head.device_index;
    segment.stream = c10::impl::VirtualGuardImpl(source->device().type())
                         .getStream(source->device())
                         .native_handle();
  }
  packet->segments.push_back(std::move(segment));
  return absl::OkStatus();
}

absl::Status AppendSparse(const at::Tensor& tensor, Head head, Packet* packet) {
  const at::Tensor local = tensor.is_cpu() ? tensor : tensor.cpu();
  DG_ASSIGN_OR_RETURN(const at::Tensor indices, ToPlain(local._indices()));
  DG_ASSIGN_OR_RETURN(const at::Tensor values, ToPlain(local._values()));
  head.form = kSparse;
  head.dtype = static_cast<uint8_t>(local.scalar_type());
  head.dims = static_cast<uint8_t>(local.dim());
  head.sparse_dims = static_cast<uint8_t>(local.sparse_dim());
  if (local.is_coalesced()) head.flags |= kCoalesced;
  WireWriter writer(&packet->bytes);
  AppendHead(head, local.sizes(), writer);
  DG_RETURN_IF_ERROR(AppendStrided(indices, Head{}, /*contiguous=*/true, packet));
  return AppendStrided(values, Head{}, /*contiguous=*/true, packet);
}

// The first of those with a tensor.
std::optional<at::Device> FirstGpu(absl::Span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  }
  return std::nullopt;
}

bool IsSmallOnGpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided &&
         tensor.nbytes() <= kInlineBytes && IsPlain(*tensor.unsafeGetTensorImpl(), kPlainGpuKeys);
}

// What is read in the order of a stream that is captured would be read when the graph runs. To wait
// for it, as is done for small tensors, would end the capture.
absl::Status CheckNotCaptured(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return absl::OkStatus();
  const at::Device device = tensor.device();
  if (!IsCaptured(c10::impl::VirtualGuardImpl(device.type()).getStream(device))) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the current stream of ", device.str(),
                   " is being captured into a graph, which what is sent cannot be part of; send it "
                   "outside of the capture"));
}

// The small tensors of GPUs, each in its place, in memory of the host; the others are undefined
// there. Empty if there is no such tensor.
std::vector<at::Tensor> SmallOnHost(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> on_host;
  GpuStreams streams;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!IsSmallOnGpu(tensors[i])) continue;
    on_host.resize(tensors.size());
    on_host[i] = CopyTo(tensors[i], at::kCPU, /*non_blocking=*/true);
    streams.Add(tensors[i].device());
  }
  streams.Await();
  return on_host;
}

// Whether a tensor of a GPU goes by way of the host, though there is a channel: it is faster there.
// One that is expanded does not, for its size says little. `by_host` counts the bytes of a message,
// of which memory of the host has no more than its part.
bool GoesByHost(const at::Tensor& tensor, size_t* by_host) {
  if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense() ||
      tensor.nbytes() > kGpuByHostBytes || *by_host + tensor.nbytes() > kMessageByHostBytes) {
    return false;
  }
  *by_host += tensor.nbytes();
  return true;
}

// `on_host`, if it is defined, has the elements of a tensor of a GPU. `by_host` is as above.
absl::Status AppendTensor(const at::Tensor& tensor, const at::Tensor& on_host,
                          const DeviceMap& devices, size_t* by_host, Packet* packet) {
  Head head;
  if (!tensor.defined()) {
    WireWriter writer(&packet->bytes);
    AppendHead(head, {}, writer);
    return absl::OkStatus();
  }
  if (!CanTravel(tensor.scalar_type())) {
    return absl::UnimplementedError(
        absl::StrCat("tensors of dtype ", at::toString(tensor.scalar_type()), " cannot be sent"));
  }
  if (tensor.dim() > kMaxDims) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a tensor of ", tensor.dim(), " dimensions cannot be sent; ", kMaxDims, " is the limit"));
  }
  if (IsPlain(*tensor.unsafeGetTensorImpl())) {
    return AppendStrided(tensor, head, /*contiguous=*/false, packet);
  }
  // No device map would help.
  if (tensor.is_meta()) return absl::UnimplementedError("a meta tensor has no elements to send");
  if (!tensor.is_cpu()) {
    DG_ASSIGN_OR_RETURN(const at::Device device, devices.Remote(tensor.device()));
    head.device = static_cast<uint8_t>(device.type());
    head.device_index = static_cast<uint8_t>(std::max<int>(device.index(), 0));
  }
  if (tensor.is_sparse()) return AppendSparse(tensor, head, packet);
  if (on_host.defined()) return AppendStrided(on_host, head, /*contiguous=*/false, packet);
  const bool stays = devices.carries_gpus() && tensor.is_cuda() &&
                     tensor.scalar_type() != at::kBool &&
                     head.device == static_cast<uint8_t>(at::kCUDA) && !GoesByHost(tensor, by_host);
  DG_ASSIGN_OR_RETURN(const at::Tensor plain, ToPlain(tensor, stays));
  return AppendStrided(plain, head, /*contiguous=*/false, packet);
}

}  // namespace

bool HasDeviceTensors(absl::Span<const at::Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.defined() && !tensor.is_cpu(); });
}

absl::Status AppendMessage(const Message& message, Packet* packet, const DeviceMap& devices) {
  const size_t bytes_before = packet->bytes.size();
  const size_t segments_before = packet->segments.size();
  WireWriter writer(&packet->bytes);
  writer.U8(kMessageVersion);
  writer.U32(static_cast<uint32_t>(message.tensors.size()));
  writer.U64(message.payload.size());
  writer.Raw(message.payload.data(), message.payload.size());
  absl::Status status;
  size_t index = 0, by_host = 0;
  const auto append = [&] {
    const std::vector<at::Tensor> on_host = SmallOnHost(message.tensors);
    for (; index < message.tensors.size() && status.ok(); ++index) {
      status = AppendTensor(message.tensors[index], on_host.empty() ? at::Tensor() : on_host[index],
                            devices, &by_host, packet);
    }
  };
  try {
    c10::NoGradGuard no_grad;
    if (const std::optional<at::Device> gpu = FirstGpu(message.tensors)) {
      for (; index < message.tensors.size() && status.ok(); ++index) {
        status = CheckNotCaptured(message.tensors[index]);
      }
      if (status.ok()) {
        index = 0;
        OutsideOfCaptures(*gpu, append);
      }
    } else {
      append();
    }
  } catch (...) {
    status = StatusFromException(std::current_exception());
    ++index;
  }
  if (status.ok()) return status;
  packet->bytes.resize(bytes_before);
  packet->segments.resize(segments_before);
  return Annotate(status, absl::StrCat("tensor ", index - 1));
}

}  // namespace distgrad
