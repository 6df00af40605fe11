// How a message and its tensors stand in a packet: what AppendMessage and ReadMessage share.
// Private to them.
//
// A message is
//
//   u8 version, u32 tensors, u64 bytes of payload, payload, one record for each tensor
//
// and a record is eight single bytes (Head), a i64 size for each dimension, as many i64 strides
// if kStrides is set, and the elements: here, or in the next segment if kInSegment is set. How
// many they are follows from sizes and strides. A sparse tensor has two more records in place
// of elements: its indices and its values.
#ifndef DISTGRAD_CORE_TENSOR_MESSAGE_FORMAT_H_
#define DISTGRAD_CORE_TENSOR_MESSAGE_FORMAT_H_

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace distgrad::internal {

inline constexpr uint8_t kMessageVersion = 1;
inline constexpr int kMaxDims = 64;
inline constexpr size_t kHeadBytes = 8;

enum Form : uint8_t { kUndefined = 0, kStrided = 1, kSparse = 2 };

enum Flag : uint8_t {
  kStrides = 1,    // not those of a contiguous tensor
  kInSegment = 2,  // the elements are
  kCoalesced = 4,  // of a sparse tensor
};

struct Head {
  Form form = kUndefined;
  uint8_t dtype = 0;  // libtorch's number
  uint8_t dims = 0;
  uint8_t flags = 0;
  uint8_t device = 0;  // libtorch's number of the type, 0 being the CPU
  uint8_t device_index = 0;
  uint8_t sparse_dims = 0;
  uint8_t reserved = 0;
};
static_assert(sizeof(Head) == kHeadBytes && alignof(Head) == 1, "Head is written as it is");

// The wire has libtorch's numbers of dtypes and devices. It never changed one; should it, these are
// the ones to check.
static_assert(static_cast<int>(at::kByte) == 0 && static_cast<int>(at::kFloat) == 6 &&
                  static_cast<int>(at::kBool) == 11 && static_cast<int>(at::kBFloat16) == 15 &&
                  static_cast<int>(at::ScalarType::UInt64) == 29 &&
                  static_cast<int>(at::ScalarType::Float8_e8m0fnu) == 44,
              "dtype numbers are part of the wire format");
static_assert(static_cast<int>(at::kCPU) == 0 && static_cast<int>(at::kCUDA) == 1,
              "device numbers are part of the wire format");

inline bool CanTravel(at::ScalarType dtype) {
  return static_cast<int>(dtype) >= 0 && dtype < at::ScalarType::Undefined &&
         !at::isQIntType(dtype);
}

// How many elements there are in memory, if they lie there with no gap and each at one place.
// A stride of 0 repeats what is there, and adds no element. For tensors that are not empty.
inline std::optional<int64_t> DenseElements(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::array<size_t, kMaxDims> order;
  size_t count = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1 || strides[i] == 0) continue;
    size_t at = count++;
    for (; at > 0 && strides[order[at - 1]] > strides[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t elements = 1;
  for (size_t i = 0; i < count; ++i) {
    if (strides[order[i]] != elements) return std::nullopt;
    elements *= sizes[order[i]];  // no overflow: a part of a product that was checked
  }
  return elements;
}

// Copies a tensor to another device. One that shows an element in many places, as expand() makes
// it, does so there, too, and only what is in memory is copied: Tensor::to() would make all of it.
inline at::Tensor CopyTo(const at::Tensor& tensor, at::Device device, bool non_blocking = false) {
  const bool may_repeat =
      tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.numel() > 0;
  const std::optional<int64_t> elements =
      may_repeat ? DenseElements(tensor.sizes(), tensor.strides()) : std::nullopt;
  if (!elements.has_value() || *elements == tensor.numel()) return tensor.to(device, non_blocking);
  // Its views are views of nothing, whatever the caller's grad mode is: it may be written to later.
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor.as_strided({*elements}, {1})
      .to(device, non_blocking)
      .as_strided(tensor.sizes(), tensor.strides(), 0);
}

}  // namespace distgrad::internal

#endif  // DISTGRAD_CORE_TENSOR_MESSAGE_FORMAT_H_
