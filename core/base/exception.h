// What an exception of the standard library says, as a Status. core/tensor/exception.h does the
// same for those of libtorch.
#ifndef DISTGRAD_CORE_BASE_EXCEPTION_H_
#define DISTGRAD_CORE_BASE_EXCEPTION_H_

#include <exception>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// Logs the exception that is being handled, and that `who` threw it.
void LogThrown(absl::string_view who);

// Memory that cannot be had is kResourceExhausted, what lies outside of a range and what is not
// valid kInvalidArgument, and all else kInternal. `exception` must not be null.
absl::Status StatusFromStdException(std::exception_ptr exception);

// Calls a callback of another owner. What it throws goes to the log: there is no caller to tell,
// and others wait for what this thread does next. `what` says in the log what it is.
template <typename Callback, typename... Arguments>
void CallAndLog(absl::string_view what, Callback& callback, const Arguments&... arguments) {
  try {
    callback(arguments...);
  } catch (...) {
    LogThrown(what);
  }
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_EXCEPTION_H_
