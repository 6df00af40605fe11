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
// memory as another; `read` the values, on the CPU, where tensors share bytes otherwise. Tensors
// whose ranges touch, from the first byte to the last, take memory: as much as lies in these
// ranges, and, where they do share bytes, as much again and a few times the largest of them. None
// may share memory with itself (MayOverlapItself()).
absl::StatusOr<std::map<std::string, std::string>> FindConflicts(
    const std::map<std::string, at::Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<uint32_t>(const std::string& name)> sum,
    absl::FunctionRef<absl::StatusOr<at::Tensor>(const std::string& name)> read);

// Returns whether two elements of a tensor may be one in memory: no load can give each of them its
// value then. True, too, of some strides whose elements do not meet, as no slice, view or
// permutation of a whole tensor has them.
bool MayOverlapItself(const at::Tensor& tensor);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_SHARED_MEMORY_H_
