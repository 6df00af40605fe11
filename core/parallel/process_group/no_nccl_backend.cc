// Says that there is no NCCL; for builds without CUDA.
#include "absl/status/status.h"
#include "core/parallel/process_group/new_backend.h"

namespace distgrad {

absl::StatusOr<c10::Device> NcclDevice() {
  return absl::FailedPreconditionError(
      "NCCL: this build has no CUDA; one with --config=cuda has it");
}

NewBackend NewNcclBackend(const BackendPlace& /*place*/) { return {}; }

}  // namespace distgrad
