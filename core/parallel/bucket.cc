// Sorts tensors into buckets, and views buckets as tensors.
#include "core/parallel/bucket.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

namespace distgrad {
namespace {

// What vector units and cuBLAS want a matrix to begin at.
constexpr size_t kAlignment = 64;

bool FitsFlat(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() &&
         !at::isTensorSubclassLike(tensor);
}

std::vector<int64_t> DenseStrides(const at::Tensor& tensor, SlotOrder order) {
  const bool keeps_own =
      order == SlotOrder::kOwn ? tensor.is_non_overlapping_and_dense() : tensor.is_contiguous();
  if (keeps_own) return tensor.strides().vec();
  std::vector<int64_t> strides(tensor.dim());
  int64_t stride = 1;
  for (int64_t i = tensor.dim() - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(tensor.size(i), 1);
  }
  return strides;
}

int64_t NumElements(const Bucket::Slot& slot) {
  int64_t elements = 1;
  for (const int64_t size : slot.sizes) elements *= size;
  return elements;
}

// The parts of the buffer that no member is copied to: what lies between members, and the places of
// those that are undefined. As bytes, for not all dtypes can be cleared.
std::vector<at::Tensor> Gaps(const Bucket& bucket, absl::Span<const at::Tensor> tensors,
                             const at::Tensor& flat) {
  const at::Tensor bytes = flat.view(at::kByte);
  const auto size = static_cast<int64_t>(flat.itemsize());
  std::vector<at::Tensor> gaps;
  int64_t end = 0;
  const auto add_gap_until = [&](int64_t begin) {
    if (end < begin) gaps.push_back(bytes.narrow(0, end * size, (begin - end) * size));
  };
  for (const Bucket::Slot& slot : bucket.slots) {
    if (!tensors[slot.tensor].defined()) continue;
    add_gap_until(slot.offset);
    end = slot.offset + NumElements(slot);
  }
  add_gap_until(bucket.elements);
  return gaps;
}

// On the CPU a call of the dispatcher takes longer than the copy of a small tensor.
bool CopyOnHost(const at::Tensor& tensor, const Bucket::Slot& slot, char* to) {
  if (!tensor.is_cpu() || tensor.strides() != slot.strides || tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  // An empty tensor has no address to copy from.
  if (tensor.numel() > 0) std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
  return true;
}

at::Tensor Part(const Bucket::Slot& slot, const at::Tensor& flat) {
  // Below autograd: nothing is recorded, and no view is made of it.
  const at::AutoDispatchBelowADInplaceOrView below;
  return flat.as_strided(slot.sizes, slot.strides, flat.storage_offset() + slot.offset);
}

at::Tensor PackOnHost(const Bucket& bucket, absl::Span<const at::Tensor> tensors,
                      const at::TensorOptions& options, at::Tensor spare) {
  const bool free = spare.defined() && spare.use_count() == 1 && spare.storage().use_count() == 1;
  at::Tensor flat = free ? std::move(spare) : at::empty({bucket.elements}, options);
  if (bucket.elements == 0) return flat;
  char* const data = static_cast<char*>(flat.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(flat.itemsize());
  for (size_t i = 0; i < bucket.slots.size(); ++i) {
    const Bucket::Slot& slot = bucket.slots[i];
    const int64_t end = i + 1 < bucket.slots.size() ? bucket.slots[i + 1].offset : bucket.elements;
    const at::Tensor& tensor = tensors[slot.tensor];
    const int64_t filled = tensor.defined() ? slot.offset + NumElements(slot) : slot.offset;
    if (tensor.defined() && !CopyOnHost(tensor, slot, data + slot.offset * bytes)) {
      Part(slot, flat).copy_(tensor);
    }
    std::memset(data + filled * bytes, 0, (end - filled) * bytes);
  }
  return flat;
}

}  // namespace

std::vector<Bucket> AssignBuckets(absl::Span<const at::Tensor> tensors, size_t bytes,
                                  size_t first_bytes, SlotOrder order) {
  struct Open {
    Bucket bucket;
    size_t bytes = 0;
    size_t limit = 0;
    bool begun = false;
  };
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>, Open> open;
  std::vector<Bucket> full;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) continue;
    Bucket fresh;
    fresh.device = tensor.device();
    fresh.dtype = tensor.scalar_type();
    if (!FitsFlat(tensor)) {
      fresh.flat = false;
      fresh.slots.push_back({i, 0, {}, {}});
      full.push_back(std::move(fresh));
      continue;
    }
    Open& current = open[{fresh.device.type(), fresh.device.index(), fresh.dtype}];
    const size_t size = tensor.numel() * tensor.itemsize();
    if (!std::exchange(current.begun, true)) {
      current.bucket = fresh;
      current.limit = first_bytes > 0 ? first_bytes : bytes;
    }
    if (!current.bucket.slots.empty() && current.bytes + size > current.limit) {
      full.push_back(std::exchange(current.bucket, fresh));
      current.bytes = 0;
      current.limit = bytes;
    }
    const size_t aligned = (size + kAlignment - 1) / kAlignment * kAlignment;
    current.bucket.slots.push_back(
        {i, current.bucket.elements, tensor.sizes().vec(), DenseStrides(tensor, order)});
    current.bucket.elements += static_cast<int64_t>(aligned / tensor.itemsize());
    current.bytes += size;
  }
  for (auto& [key, last] : open) full.push_back(std::move(last.bucket));
  return full;
}

std::vector<at::Tensor> Parts(const Bucket& bucket, const at::Tensor& flat) {
  std::vector<at::Tensor> parts;
  parts.reserve(bucket.slots.size());
  for (const Bucket::Slot& slot : bucket.slots) parts.push_back(Part(slot, flat));
  return parts;
}

at::Tensor Pack(const Bucket& bucket, absl::Span<const at::Tensor> tensors, at::Tensor spare) {
  const at::NoGradGuard no_grad;
  at::TensorOptions options = at::TensorOptions(bucket.dtype);
  for (const Bucket::Slot& slot : bucket.slots) {
    const at::Tensor& tensor = tensors[slot.tensor];
    if (!tensor.defined()) continue;
    TORCH_CHECK_VALUE(tensor.sizes() == slot.sizes && tensor.scalar_type() == bucket.dtype,
                      "tensor ", slot.tensor, " is ", tensor.sizes(), " of ", tensor.scalar_type(),
                      ", and its bucket has ", slot.sizes, " of ", bucket.dtype, " for it");
    options = options.device(tensor.device());
  }
  if (options.device().is_cpu()) return PackOnHost(bucket, tensors, options, std::move(spare));
  const c10::DeviceGuard guard(options.device());
  at::Tensor flat = at::empty({bucket.elements}, options);
  // Not all of it: that takes as long as half of the copies.
  const std::vector<at::Tensor> gaps = Gaps(bucket, tensors, flat);
  if (!gaps.empty()) at::_foreach_zero_(gaps);
  std::vector<at::Tensor> to, from;
  for (const Bucket::Slot& slot : bucket.slots) {
    if (!tensors[slot.tensor].defined()) continue;
    to.push_back(Part(slot, flat));
    from.push_back(tensors[slot.tensor]);
  }
  CopyMany(to, from);
  return flat;
}

void Unpack(const Bucket& bucket, const at::Tensor& flat, absl::Span<const at::Tensor> tensors) {
  std::vector<at::Tensor> to, from;
  for (const Bucket::Slot& slot : bucket.slots) {
    if (!tensors[slot.tensor].defined()) continue;
    to.push_back(tensors[slot.tensor]);
    from.push_back(Part(slot, flat));
  }
  CopyMany(to, from);
}

}  // namespace distgrad
