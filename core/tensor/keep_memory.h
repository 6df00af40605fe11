// Memory of an accelerator that a stream uses which the allocator does not know of.
#ifndef DISTGRAD_CORE_TENSOR_KEEP_MEMORY_H_
#define DISTGRAD_CORE_TENSOR_KEEP_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace distgrad {

// Has the allocator keep the tensor's memory, once it is freed, until `stream` is done with what it
// has been given by then. Nothing for a tensor that is undefined, or not on the stream's device.
void KeepMemoryFor(const at::Tensor& tensor, c10::Stream stream);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_KEEP_MEMORY_H_
