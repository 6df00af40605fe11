// Finds an operator by the name that a request has for it.
#ifndef DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_
#define DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Of "aten::mm", or with its overload "aten::add.Tensor". kNotFound for an unknown name, with those
// near to it.
//
// Whoever needs it several times hands on what it has found. The dispatcher's own table is fast
// enough, and stays right when libraries of operators come and go: nothing is kept here.
// Thread-safe.
absl::StatusOr<c10::OperatorHandle> FindOperator(absl::string_view name);

// The name by which FindOperator() finds it.
std::string NameOf(const c10::OperatorName& name);
inline std::string NameOf(const c10::OperatorHandle& op) { return NameOf(op.operator_name()); }

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_
