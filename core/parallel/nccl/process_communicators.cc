// Has one pool, which is left at the exit.
#include "core/parallel/nccl/process_communicators.h"

#include <cstdlib>

#include "core/base/status.h"
#include "core/parallel/nccl/nccl_pool.h"
#include "core/parallel/nccl/real_nccl_group.h"

namespace distgrad {
namespace {

// Like libtorch's own state of CUDA it is never destroyed, for at the end of a process CUDA may be
// gone before it.
NcclPool& Pool() {
  static NcclPool* const pool = new NcclPool(RealNcclPlatform());
  return *pool;
}

}  // namespace

absl::StatusOr<std::shared_ptr<NcclCommunicators>> ProcessCommunicators(
    const std::vector<c10::Device>& devices, absl::Duration timeout) {
  DG_ASSIGN_OR_RETURN(auto communicators, Pool().Get(devices, timeout));
  // Of what exit() ends in the reverse of the order in which it began: libtorch's state of CUDA is
  // there by now, and lasts until all have left.
  static const bool leaves = std::atexit([] { Pool().Leave(); }) == 0;
  if (!leaves) return absl::ResourceExhaustedError("there is no memory for a call at the exit");
  return communicators;
}

}  // namespace distgrad
