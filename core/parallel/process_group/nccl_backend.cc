// Makes c10d's backend for NCCL, and picks its GPU; for builds with CUDA.
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "absl/status/status.h"
#include "core/parallel/process_group/c10d_store.h"
#include "core/parallel/process_group/new_backend.h"

namespace distgrad {
namespace {

class Nccl : public c10d::ProcessGroupNCCL {
 public:
  Nccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
       c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(std::move(store), rank, size, std::move(options)) {
    // Otherwise c10d ends the process when a collective fails or is late, and wait() returns before
    // that can be known.
    asyncErrorHandling_ = c10d::NoHandling;
    blockingWait_ = true;
  }
};

}  // namespace

absl::StatusOr<c10::Device> NcclDevice() {
  if (c10::cuda::device_count() == 0) {
    return absl::FailedPreconditionError("NCCL: CUDA finds no GPU on this machine");
  }
  return c10::Device(c10::kCUDA, c10::cuda::current_device());
}

NewBackend NewNcclBackend(const BackendPlace& place) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = absl::ToChronoMilliseconds(place.timeout);
  return {c10::make_intrusive<Nccl>(C10dStoreOf(place.store, place.timeout), place.rank, place.size,
                                    std::move(options))};
}

}  // namespace distgrad
