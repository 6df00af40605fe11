// Where libtorch throws and we answer with a Status.
#ifndef DISTGRAD_CORE_TENSOR_EXCEPTION_H_
#define DISTGRAD_CORE_TENSOR_EXCEPTION_H_

#include <exception>

#include "absl/status/status.h"

namespace distgrad {

// What an exception says, without libtorch's C++ backtrace. Index, value and type errors are
// kInvalidArgument, what is not implemented kUnimplemented, memory that cannot be had
// kResourceExhausted, and all else kInternal. `exception` must not be null.
//
//   try {
//     ...
//   } catch (...) {
//     return StatusFromException(std::current_exception());
//   }
absl::Status StatusFromException(std::exception_ptr exception);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_EXCEPTION_H_
