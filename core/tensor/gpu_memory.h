// The memory of this process's GPUs, as torch's allocator gives it.
#ifndef DISTGRAD_CORE_TENSOR_GPU_MEMORY_H_
#define DISTGRAD_CORE_TENSOR_GPU_MEMORY_H_

#include <memory>

#include "core/transport/device_memory.h"

namespace distgrad {

// Each GPU has one stream that writes what arrives, and allocates for it: so memory that comes free
// is used again without any wait. Segments are owned by a c10::Storage, as AppendMessage's are.
// Null where torch finds no GPU. A GPU that nothing arrives on is not touched.
std::unique_ptr<DeviceMemory> NewGpuMemory();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_GPU_MEMORY_H_
