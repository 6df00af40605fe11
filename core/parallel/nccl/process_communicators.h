// The communicators over NCCL that this process keeps, and which let it end.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_PROCESS_COMMUNICATORS_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_PROCESS_COMMUNICATORS_H_

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/parallel/nccl/nccl_communicators.h"

namespace distgrad {

// Those of these GPUs, which are distinct, as NcclPool::Get() has them. From exit() on they ask
// nothing of CUDA.
absl::StatusOr<std::shared_ptr<NcclCommunicators>> ProcessCommunicators(
    const std::vector<c10::Device>& devices, absl::Duration timeout);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_PROCESS_COMMUNICATORS_H_
