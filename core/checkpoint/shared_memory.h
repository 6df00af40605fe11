// Tensors that share memory, and cannot all have the values that they are to be loaded with.
#ifndef DISTGRAD_CORE_CHECKPOINT_SHARED_MEMORY_H_
#define DISTGRAD_CORE_CHECKPOINT_SHARED_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace distgrad {

// Says of which of these tensors the memory cannot have its values together with those of the
// tensors before it, by their names; and why, for people. It goes by addresses, whatever storages
// the tensors have of one buffer. Nothing is written.
//
// `sum` returns a checksum of a tensor's values, and is asked where a tensor is the very same
// memory as another; `read` the values, on the CPU, where tensors overlap otherwise. These then
// take memory: for what lies between the first and the last byte of such tensors, twice, and for
// the largest of them.
absl::StatusOr<std::map<std::string, std::string>> FindConflicts(
    const std::map<std::string, at::Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<uint32_t>(const std::string& name)> sum,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(const std::string& name)> read);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_SHARED_MEMORY_H_
