// Tells the caching allocator of a stream that uses a tensor's memory.
#include "core/tensor/keep_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace distgrad {

void KeepMemoryFor(const at::Tensor& tensor, c10::Stream stream) {
  if (!tensor.defined()) return;
  if (tensor.is_sparse()) {
    KeepMemoryFor(tensor._indices(), stream);
    KeepMemoryFor(tensor._values(), stream);
  } else if (tensor.has_storage() && tensor.device() == stream.device()) {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

}  // namespace distgrad
