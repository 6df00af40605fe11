// Calls any operator that is registered with libtorch, by the name of its schema.
//
//   DG_ASSIGN_OR_RETURN(std::vector<c10::IValue> results,
//                       CallOperator("aten::max.dim", {tensor, 1}));
//   at::Tensor values = results[0].toTensor(), indices = results[1].toTensor();
#ifndef DISTGRAD_CORE_TENSOR_OPERATOR_H_
#define DISTGRAD_CORE_TENSOR_OPERATOR_H_

#include <ATen/core/ivalue.h>

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/tensor/values.h"  // IWYU pragma: export: what the arguments travel as

namespace c10 {
class OperatorHandle;
}

namespace distgrad {

// Calls the operator `name`: "aten::mm", or with its overload "aten::add.Tensor". Autograd
// records it as it does any call.
//
// `args` are the schema's arguments in their order, those after the "*" too. What is missing at
// the end gets its default. Where the schema asks for it, an int or bool becomes a double, a
// single number fills an int[N], a number becomes a 0-dimensional tensor of weak dtype, a string
// names a device, and an undefined tensor is no tensor.
//
// kNotFound for an unknown name, with those near to it; kInvalidArgument, before anything runs,
// for arguments that don't fit the schema, and for names of dimensions; what the operator throws
// with its name, and as in StatusFromException, but for what it checks of its arguments
// (TORCH_CHECK): that is kInvalidArgument too.
//
// Thread-safe.
absl::StatusOr<std::vector<c10::IValue>> CallOperator(absl::string_view name,
                                                      std::vector<c10::IValue> args);

// The same of one that has been found (find_operator.h).
absl::StatusOr<std::vector<c10::IValue>> CallOperator(const c10::OperatorHandle& op,
                                                      std::vector<c10::IValue> args);

// Whether an operator only computes: kPermissionDenied as of CheckSafe() (operator_policy.h), and
// for one that writes to its arguments, whose memory other threads may be reading. kNotFound as
// above. Thread-safe.
absl::Status CheckFunctional(absl::string_view name);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_OPERATOR_H_
