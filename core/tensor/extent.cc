// Adds up strides. Sizes and strides that no storage has give no sum that wraps around.
#include "core/tensor/extent.h"

#include <limits>

namespace distgrad {

uint64_t ExtentOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  uint64_t extent = 1;  // in elements
  bool fits = true;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    uint64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(tensor.size(d) - 1, tensor.stride(d), &reach) &&
           !__builtin_add_overflow(extent, reach, &extent);
  }
  fits = fits && !__builtin_mul_overflow(extent, tensor.element_size(), &extent);
  return fits ? extent : std::numeric_limits<uint64_t>::max();
}

bool IsInMemory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  if (tensor._is_zerotensor()) return false;
  uint64_t end = 0;
  return !__builtin_mul_overflow(tensor.storage_offset(), tensor.element_size(), &end) &&
         !__builtin_add_overflow(end, ExtentOf(tensor), &end) && end <= tensor.storage().nbytes();
}

}  // namespace distgrad
