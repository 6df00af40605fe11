// Copies by libtorch's _foreach_copy_(); for builds without CUDA.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/DeviceGuard.h>

#include "core/parallel/bucket.h"

namespace distgrad {

void CopyMany(absl::Span<const at::Tensor> to, absl::Span<const at::Tensor> from) {
  if (to.empty()) return;
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(to[0].device());
  at::_foreach_copy_(at::TensorList(to.data(), to.size()),
                     at::TensorList(from.data(), from.size()));
}

}  // namespace distgrad
