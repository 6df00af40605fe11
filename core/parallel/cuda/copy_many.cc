// Copies by our kernel what lies alike at both ends, the rest by libtorch, which also has kernels
// for older GPUs; for builds with CUDA.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <vector>

#include "core/parallel/bucket.h"
#include "core/parallel/cuda/copy_kernel.h"

namespace distgrad {
namespace {

// Whether the elements of both are the same bytes in the same order.
bool IsOneCopy(const at::Tensor& to, const at::Tensor& from) {
  return to.is_cuda() && from.device() == to.device() && to.layout() == at::kStrided &&
         from.layout() == at::kStrided && to.scalar_type() == from.scalar_type() &&
         to.sizes() == from.sizes() && to.strides() == from.strides() &&
         to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg();
}

// Asked once for each device: it may load the kernel.
bool HasKernel(c10::Device device) {
  struct Known {
    std::once_flag asked;
    bool has = false;
  };
  static auto* const known = new std::vector<Known>(c10::cuda::device_count());
  Known& here = known->at(device.index());
  std::call_once(here.asked, [&] { C10_CUDA_CHECK(HasCopyKernel(&here.has)); });
  return here.has;
}

}  // namespace

void CopyMany(absl::Span<const at::Tensor> to, absl::Span<const at::Tensor> from) {
  if (to.empty()) return;
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(to[0].device());
  const bool has_kernel = to[0].is_cuda() && HasKernel(to[0].device());
  std::vector<CopyJob> jobs;
  std::vector<at::Tensor> rest_to, rest_from;
  for (size_t i = 0; i < to.size(); ++i) {
    if (has_kernel && to[i].device() == to[0].device() && IsOneCopy(to[i], from[i])) {
      jobs.push_back({to[i].mutable_data_ptr(), from[i].const_data_ptr(), from[i].nbytes()});
      // As torch's own in-place operators do: what autograd saved of it is no longer valid.
      if (!to[i].is_inference()) to[i].unsafeGetTensorImpl()->bump_version();
    } else {
      rest_to.push_back(to[i]);
      rest_from.push_back(from[i]);
    }
  }
  if (!jobs.empty()) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(to[0].get_device());
    C10_CUDA_CHECK(LaunchCopies(jobs.data(), jobs.size(), stream.stream()));
  }
  if (!rest_to.empty()) at::_foreach_copy_(rest_to, rest_from);
}

}  // namespace distgrad
