// The operators of libtorch that a worker serves to its peers unless told otherwise.
#ifndef DISTGRAD_CORE_TENSOR_SERVED_OPERATORS_H_
#define DISTGRAD_CORE_TENSOR_SERVED_OPERATORS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace distgrad {

// Names without their namespace and overload ("add"), in groups of which each is sorted, and no
// name is in two. Each stands for all of its overloads, and for the operator that does the same in
// place
// ("add_"); CheckServed() (operator_policy.h) leaves out those that are unsafe.
absl::Span<const absl::Span<const absl::string_view>> ServedOperators();

// Whether an operator ("aten::add", "aten::add_"), in any of its overloads, is one of these.
// Thread-safe.
bool IsListed(absl::string_view name);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_SERVED_OPERATORS_H_
