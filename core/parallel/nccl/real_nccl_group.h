// The group of communicators that NCCL itself has; its functions and CUDA's are a table, so that a
// test can have them fail.
#ifndef DISTGRAD_CORE_PARALLEL_NCCL_REAL_NCCL_GROUP_H_
#define DISTGRAD_CORE_PARALLEL_NCCL_REAL_NCCL_GROUP_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/parallel/nccl/nccl_group.h"
#include "nccl.h"

namespace distgrad {

// The functions of libnccl, as libnccl and libtorch have them.
struct NcclFunctions {
  int (*device_count)() = nullptr;
  int (*exchange_device)(int device) = nullptr;  // returns the one that was current
  void (*restore_device)(int device) = nullptr;  // makes that one current again
  cudaStream_t (*stream)(c10::Stream stream) = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = &ncclGetUniqueId;
  decltype(&ncclCommInitRankConfig) init_rank = &ncclCommInitRankConfig;
  decltype(&ncclCommGetAsyncError) get_async_error = &ncclCommGetAsyncError;
  decltype(&ncclCommAbort) abort = &ncclCommAbort;
  decltype(&ncclGroupStart) group_start = &ncclGroupStart;
  decltype(&ncclGroupEnd) group_end = &ncclGroupEnd;
  decltype(&ncclReduce) reduce = &ncclReduce;
  decltype(&ncclBroadcast) broadcast = &ncclBroadcast;
  decltype(&ncclGetErrorString) error_string = &ncclGetErrorString;
  decltype(&ncclGetLastError) last_error = &ncclGetLastError;

  static NcclFunctions Real();
};

// NCCL's name of a type that NcclAdds().
ncclDataType_t NcclDataType(c10::ScalarType dtype);

// kFailedPrecondition where NCCL_COMM_BLOCKING is 1: NCCL has communicators block then, whatever
// their creator asks for. NCCL's file of variables (nccl.conf) counts once ncclGetUniqueId() has
// been called, for that puts them into the environment.
absl::Status NcclDoesNotBlock();

// Communicators that do not block, one for each of `devices`, which are distinct CUDA devices.
// kFailedPrecondition if one of them is not there, or they would block; kInternal with NCCL's words
// if it fails.
absl::StatusOr<std::unique_ptr<NcclGroup>> StartNcclGroup(
    const std::vector<c10::Device>& devices,
    const NcclFunctions& functions = NcclFunctions::Real());

// NCCL itself, and CUDA's devices.
NcclPlatform RealNcclPlatform();

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NCCL_REAL_NCCL_GROUP_H_
