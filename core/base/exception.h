// What an exception of the standard library says, as a Status. core/tensor/exception.h does the
// same for those of libtorch.
#ifndef DISTGRAD_CORE_BASE_EXCEPTION_H_
#define DISTGRAD_CORE_BASE_EXCEPTION_H_

#include <exception>

#include "absl/status/status.h"

namespace distgrad {

// Memory that cannot be had is kResourceExhausted, what lies outside of a range and what is not
// valid kInvalidArgument, and all else kInternal. `exception` must not be null.
absl::Status StatusFromStdException(std::exception_ptr exception);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_EXCEPTION_H_
