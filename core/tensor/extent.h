// How far a tensor reaches in memory.
#ifndef DISTGRAD_CORE_TENSOR_EXTENT_H_
#define DISTGRAD_CORE_TENSOR_EXTENT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace distgrad {

// Returns the bytes from the first element of a strided tensor to the end of the one that is
// furthest behind it: 0 where it has none, and the greatest number where they are more than that.
uint64_t ExtentOf(const at::Tensor& tensor);

// Returns whether all elements of a strided tensor are in its memory: a storage may have been
// resized, or be none, as of a tensor whose elements are known to be zero. The elements of others
// can be neither read nor written.
bool IsInMemory(const at::Tensor& tensor);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_EXTENT_H_
