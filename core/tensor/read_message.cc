// Reads a message back from a packet that may be hostile.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/gpu_streams.h"
#include "core/tensor/graph_capture.h"
#include "core/tensor/keep_memory.h"
#include "core/tensor/message_codec.h"
#include "core/tensor/message_format.h"

namespace distgrad {
namespace {

using namespace internal;  // NOLINT: the format is ours

// The product of `sizes`, and of them as if none were 0, which must not overflow either:
// libtorch computes strides from it.
std::optional<int64_t> Product(at::IntArrayRef sizes, int64_t item_size) {
  int64_t product = item_size;
  bool empty = false;
  for (int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, size, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product;
}

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("malformed tensor: ", what));
}

// A head that was checked, with the sizes and strides that follow it.
struct Record {
  Head head;
  std::array<int64_t, kMaxDims> size_array;
  std::array<int64_t, kMaxDims> stride_array;
  int64_t bytes = 0;  // of elements

  at::ScalarType dtype() const { return static_cast<at::ScalarType>(head.dtype); }
  at::IntArrayRef sizes() const { return {size_array.data(), head.dims}; }
  at::IntArrayRef strides() const { return {stride_array.data(), head.dims}; }
};

absl::Status ReadStrides(Record& record, WireReader& reader) {
  const auto item_size = static_cast<int64_t>(c10::elementSize(record.dtype()));
  if (record.bytes == 0) return Malformed("strides for no elements");
  for (int i = 0; i < record.head.dims; ++i) record.stride_array[i] = reader.I64();
  DG_RETURN_IF_ERROR(reader.status("strides"));
  std::optional<int64_t> elements = DenseElements(record.sizes(), record.strides());
  if (!elements.has_value()) return Malformed("strides with gaps or overlaps");
  for (int64_t stride : record.strides()) {
    if (stride < 0 || stride > *elements) return Malformed("a stride out of range");
  }
  record.bytes = *elements * item_size;
  return absl::OkStatus();
}

absl::Status ReadRecord(Record& record, WireReader& reader, const MessageLimits& limits) {
  Head& head = record.head;
  if (!reader.Raw(&head, kHeadBytes)) return reader.status("a tensor");
  if (head.form > kSparse || head.reserved != 0) return Malformed("unknown form");
  const uint8_t known_flags = head.form == kStrided  ? kStrides | kInSegment
                              : head.form == kSparse ? kCoalesced
                                                     : 0;
  if ((head.flags & ~known_flags) != 0) return Malformed("unknown flags");
  if (head.sparse_dims > (head.form == kSparse ? head.dims : 0)) {
    return Malformed("too many sparse dimensions");
  }
  if (head.form == kUndefined) {
    return head.dtype == 0 && head.dims == 0 && head.device == 0 && head.device_index == 0
               ? absl::OkStatus()
               : Malformed("attributes of an undefined tensor");
  }
  if (!CanTravel(record.dtype())) return Malformed(absl::StrCat("unknown dtype ", head.dtype));
  if (head.dims > std::min(limits.max_dims, kMaxDims)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a tensor of ", head.dims, " dimensions; the limit is ", limits.max_dims));
  }
  for (int i = 0; i < head.dims; ++i) record.size_array[i] = reader.I64();
  DG_RETURN_IF_ERROR(reader.status("sizes"));
  std::optional<int64_t> product =
      Product(record.sizes(), static_cast<int64_t>(c10::elementSize(record.dtype())));
  if (!product.has_value()) return Malformed("sizes that are negative or too large");
  record.bytes = *product;
  if ((head.flags & kStrides) != 0) return ReadStrides(record, reader);
  return absl::OkStatus();
}

// Whether all are 0 or 1.
bool AreBools(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t seen = 0;
  for (; size >= sizeof(seen); size -= sizeof(seen), bytes += sizeof(seen)) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    seen |= word;
  }
  for (; size > 0; --size) seen |= *bytes++;
  return (seen & ~uint64_t{0x0101010101010101}) == 0;
}

// What at::from_blob and at::empty do, without the way there through the dispatcher.
at::Tensor MakeTensor(const Record& record, c10::Storage storage, c10::DispatchKey key) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(record.dtype()));
  if ((record.head.flags & kStrides) != 0) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(record.sizes(), record.strides());
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(record.sizes());
  }
  return tensor;
}

// A tensor whose elements are in a GPU's segment, of the right size.
absl::StatusOr<at::Tensor> ReadOnGpu(const Record& record, const Segment& segment) {
  if (record.head.device != static_cast<uint8_t>(at::kCUDA) ||
      record.head.device_index != segment.device || record.dtype() == at::kBool) {
    return Malformed(absl::StrCat("its segment is on cuda:", segment.device));
  }
  const at::Tensor tensor =
      MakeTensor(record, *static_cast<c10::Storage*>(segment.owner.get()), c10::DispatchKey::CUDA);
  // It was allocated for the stream that wrote it.
  KeepMemoryFor(tensor, c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device()));
  return tensor;
}

// The elements of a strided tensor, which follow its record.
absl::StatusOr<at::Tensor> ReadElements(const Record& record, WireReader& reader,
                                        SegmentReader& segments) {
  const auto bytes = static_cast<size_t>(record.bytes);
  at::DataPtr data;
  c10::Allocator* allocator = nullptr;
  if ((record.head.flags & kInSegment) != 0) {
    if (segments.remaining() == 0) return Malformed("its segment is missing");
    if (segments.Peek().size != bytes) {
      return Malformed(
          absl::StrCat("it needs ", bytes, " bytes, and its segment has ", segments.Peek().size));
    }
    if (segments.Peek().device >= 0) return ReadOnGpu(record, segments.Take());
    Segment segment = segments.Take();
    data = at::DataPtr(
        segment.data, new std::shared_ptr<void>(std::move(segment.owner)),
        [](void* owner) { delete static_cast<std::shared_ptr<void>*>(owner); }, at::kCPU);
  } else {
    if (bytes > reader.remaining()) return Malformed("its elements are missing");
    allocator = c10::GetCPUAllocator();
    data = allocator->allocate(bytes);
    reader.Raw(data.get(), bytes);
  }
  if (record.dtype() == at::kBool && !AreBools(data.get(), bytes)) {
    // Undefined behaviour for whoever reads them as bools; libtorch takes them for true.
    auto* elements = static_cast<uint8_t*>(data.get());
    for (size_t i = 0; i < bytes; ++i) elements[i] = elements[i] != 0;
  }
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       std::move(data), allocator,
                                                       /*resizable=*/allocator != nullptr);
  return MakeTensor(record, c10::Storage(std::move(storage)), c10::DispatchKey::CPU);
}

// Reads a tensor that is a part of a sparse one.
absl::StatusOr<at::Tensor> ReadPart(WireReader& reader, SegmentReader& segments,
                                    const MessageLimits& limits) {
  Record record;
  DG_RETURN_IF_ERROR(ReadRecord(record, reader, limits));
  if (record.head.form != kStrided || (record.head.flags & kStrides) != 0 ||
      record.head.device != 0 || record.head.device_index != 0) {
    return Malformed("a part of a sparse tensor that is not a contiguous CPU tensor");
  }
  return ReadElements(record, reader, segments);
}

// `indices` is [sparse dims, entries], contiguous.
absl::Status CheckIndices(const at::Tensor& indices, at::IntArrayRef sizes, bool coalesced) {
  const int64_t dims = indices.size(0);
  const int64_t entries = indices.size(1);
  if (dims == 0) {  // then there is at most one place
    return coalesced && entries > 1 ? Malformed("sparse indices are not sorted") : absl::OkStatus();
  }
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t d = 0; d < dims; ++d) {
    for (int64_t i = 0; i < entries; ++i) {
      const int64_t at = index[d * entries + i];
      if (at < 0 || at >= sizes[d]) return Malformed("a sparse index out of range");
    }
  }
  for (int64_t i = 1; coalesced && i < entries; ++i) {
    int64_t d = 0;
    while (d < dims && index[d * entries + i - 1] == index[d * entries + i]) ++d;
    if (d == dims || index[d * entries + i - 1] > index[d * entries + i]) {
      return Malformed("sparse indices are not sorted");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> ReadSparse(const Record& record, WireReader& reader,
                                      SegmentReader& segments, const MessageLimits& limits) {
  DG_ASSIGN_OR_RETURN(const at::Tensor indices, ReadPart(reader, segments, limits));
  DG_ASSIGN_OR_RETURN(const at::Tensor values, ReadPart(reader, segments, limits));
  const int64_t sparse_dims = record.head.sparse_dims;
  const bool coalesced = (record.head.flags & kCoalesced) != 0;
  if (indices.scalar_type() != at::kLong || indices.dim() != 2 || indices.size(0) != sparse_dims) {
    return Malformed("sparse indices of a wrong shape or dtype");
  }
  if (values.scalar_type() != record.dtype() ||
      values.dim() != 1 + record.head.dims - sparse_dims || values.size(0) != indices.size(1) ||
      values.sizes().slice(1) != record.sizes().slice(sparse_dims)) {
    return Malformed("sparse values of a wrong shape or dtype");
  }
  DG_RETURN_IF_ERROR(CheckIndices(indices, record.sizes(), coalesced));
  return at::_sparse_coo_tensor_unsafe(indices, values, record.sizes(),
                                       values.options().layout(at::kSparse), coalesced);
}

// The device of a head, if this process has it.
absl::StatusOr<at::Device> FindDevice(const Head& head) {
  const auto type = static_cast<at::DeviceType>(head.device);
  if (type == at::kCPU && head.device_index == 0) return at::Device(at::kCPU);
  if (type == at::kCPU || head.device >= at::COMPILE_TIME_MAX_DEVICE_TYPES || type == at::kMeta) {
    return Malformed(absl::StrCat("unknown device ", head.device));
  }
  if (!c10::impl::hasDeviceGuardImpl(type) ||
      head.device_index >= c10::impl::getDeviceGuardImpl(type)->deviceCount()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a tensor arrived that belongs on device ", c10::DeviceTypeName(type, /*lower_case=*/true),
        ":", head.device_index, ", which this process does not have"));
  }
  return at::Device(type, static_cast<at::DeviceIndex>(head.device_index));
}

// Copies from the host to GPUs that run, and what they read. Waits for them once for each GPU.
class CopiesToGpus {
 public:
  at::Tensor Begin(at::Tensor from, at::Device to) {
    at::Tensor copy;
    OutsideOfCaptures(to, [&] { copy = CopyTo(from, to, /*non_blocking=*/true); });
    from_.push_back(std::move(from));
    streams_.Add(to);
    to_ = to;
    return copy;
  }

  // Whoever gets the message may use it on any stream.
  void Await() const {
    if (to_.has_value()) OutsideOfCaptures(*to_, [this] { streams_.Await(); });
  }

 private:
  std::vector<at::Tensor> from_;
  std::optional<at::Device> to_;  // one of them
  GpuStreams streams_;
};

absl::StatusOr<at::Tensor> ReadTensor(WireReader& reader, SegmentReader& segments,
                                      const MessageLimits& limits, CopiesToGpus& copies) {
  Record record;
  DG_RETURN_IF_ERROR(ReadRecord(record, reader, limits));
  if (record.head.form == kUndefined) return at::Tensor();
  DG_ASSIGN_OR_RETURN(const at::Device device, FindDevice(record.head));
  DG_ASSIGN_OR_RETURN(at::Tensor tensor, record.head.form == kStrided
                                             ? ReadElements(record, reader, segments)
                                             : ReadSparse(record, reader, segments, limits));
  if (device == tensor.device()) return tensor;
  return device.is_cuda() ? copies.Begin(std::move(tensor), device) : CopyTo(tensor, device);
}

absl::Status InTensor(size_t index, const absl::Status& status) {
  return Annotate(status, absl::StrCat("tensor ", index));
}

}  // namespace

absl::StatusOr<Message> ReadMessage(WireReader& reader, SegmentReader& segments,
                                    const MessageLimits& limits) {
  const uint8_t version = reader.U8();
  const uint32_t tensors = reader.U32();
  const uint64_t payload_bytes = reader.U64();
  DG_RETURN_IF_ERROR(reader.status("a message"));
  if (version != kMessageVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("message of version ", version, ", not ", kMessageVersion));
  }
  if (tensors > limits.max_tensors || payload_bytes > limits.max_payload_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a message with ", tensors, " tensors and a payload of ", payload_bytes,
        " bytes; the limits are ", limits.max_tensors, " and ", limits.max_payload_bytes));
  }
  if (payload_bytes > reader.remaining() ||
      tensors > (reader.remaining() - payload_bytes) / kHeadBytes) {
    return absl::InvalidArgumentError("a message is longer than its packet");
  }
  Message message;
  size_t index = 0;
  try {
    c10::NoGradGuard no_grad;
    message.payload.resize(payload_bytes);
    reader.Raw(message.payload.data(), payload_bytes);
    message.tensors.reserve(tensors);
    CopiesToGpus copies;
    for (; index < tensors; ++index) {
      absl::StatusOr<at::Tensor> tensor = ReadTensor(reader, segments, limits, copies);
      if (!tensor.ok()) return InTensor(index, tensor.status());
      message.tensors.push_back(*std::move(tensor));
    }
    copies.Await();
  } catch (...) {
    return InTensor(index, StatusFromException(std::current_exception()));
  }
  return message;
}

}  // namespace distgrad
