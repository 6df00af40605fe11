// Finds an operator by the name that a request has for it.
#ifndef DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_
#define DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace distgrad {

// An operator with its overload; none if there is none of that name.
inline std::optional<c10::OperatorHandle> FindOperator(absl::string_view name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchema(
      {std::string(name.substr(0, dot)),
       dot == absl::string_view::npos ? "" : std::string(name.substr(dot + 1))});
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_FIND_OPERATOR_H_
