// For builds without CUDA.
#include "core/parallel/new_reducer.h"

#include <utility>

#include "core/parallel/coalesced_reducer.h"

namespace distgrad {

absl::StatusOr<std::shared_ptr<Reducer>> NewReducer(std::vector<c10::Device> devices,
                                                    ReducerOptions options) {
  if (devices.empty()) return absl::InvalidArgumentError("a reducer needs devices");
  return std::make_shared<CoalescedReducer>(std::move(devices), options);
}

}  // namespace distgrad
