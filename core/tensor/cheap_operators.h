// Tells which calls of operators cost less than handing them to another thread.
#ifndef DISTGRAD_CORE_TENSOR_CHEAP_OPERATORS_H_
#define DISTGRAD_CORE_TENSOR_CHEAP_OPERATORS_H_

#include <ATen/core/Tensor.h>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace distgrad {

// Returns whether the operator waits for nothing, and both reads and makes little: it is one of a
// list of libtorch's own of which the shapes of its tensors say how much it makes, and that is as
// little as they are. `tensors` has each tensor of its arguments, at least. Thread-safe.
bool CheapToRunInline(absl::string_view name, absl::Span<const at::Tensor> tensors);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_CHEAP_OPERATORS_H_
