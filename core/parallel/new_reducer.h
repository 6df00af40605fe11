// Where the implementation of Reducer is picked.
#ifndef DISTGRAD_CORE_PARALLEL_NEW_REDUCER_H_
#define DISTGRAD_CORE_PARALLEL_NEW_REDUCER_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "core/parallel/reducer.h"

namespace distgrad {

// NCCL where all devices are distinct CUDA devices, coalesced adds elsewhere. kInvalidArgument
// without devices.
absl::StatusOr<std::shared_ptr<Reducer>> NewReducer(std::vector<c10::Device> devices,
                                                    ReducerOptions options = {});

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PARALLEL_NEW_REDUCER_H_
