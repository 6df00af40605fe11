// The operators that a worker runs for peers that may not do with this process what they like.
#ifndef DISTGRAD_CORE_TENSOR_OPERATOR_POLICY_H_
#define DISTGRAD_CORE_TENSOR_OPERATOR_POLICY_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace c10 {
class OperatorHandle;
}

namespace distgrad {

// Returns kPermissionDenied unless `name` ("aten::add.Tensor") is an operator of libtorch's own
// that is safe to run for a peer: it does nothing but compute. Refused are
//
//   - all namespaces but "aten": what an extension registers may do anything;
//   - names that begin with "_", but for the "_foreach_" ones: they are libtorch's internal steps,
//     many of which take sizes and indices on trust and read or write where those say;
//   - those of the others that are known to do the same (operator_schemas_test.cc looks for them);
//   - those whose results share memory with an argument, and not its version counter;
//   - those that touch files, settings of the process or a tensor's storage.
//
// An operator that does not exist is not refused here. Thread-safe.
absl::Status CheckSafe(absl::string_view name);

// Returns kPermissionDenied unless a worker serves the operator to its peers by default: it is on
// the list of those that were reviewed for that (served_operators.h), and neither unsafe as above
// nor one that takes the tensor for its result ("add.out"). A peer has no use for these, and
// several write there without a look at it. Thread-safe.
absl::Status CheckServed(const c10::OperatorHandle& op);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_OPERATOR_POLICY_H_
