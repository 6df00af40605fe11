// The border between libtorch, which throws, and our code, which answers with a Status.
#ifndef DISTGRAD_CORE_TENSOR_EXCEPTION_H_
#define DISTGRAD_CORE_TENSOR_EXCEPTION_H_

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace distgrad {

// The other way: a Status where only an exception can pass, as in a node of the graph.
class StatusError : public c10::Error {
 public:
  explicit StatusError(absl::Status status);

  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// Throws StatusError if there is no value.
template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) throw StatusError(value.status());
  return *std::move(value);
}

// What an exception says, without libtorch's C++ backtrace. A StatusError keeps its code; index,
// value and type errors are kInvalidArgument, what is not implemented kUnimplemented, memory that
// cannot be had kResourceExhausted, and all else kInternal. `exception` must not be null.
//
//   try {
//     ...
//   } catch (...) {
//     return StatusFromException(std::current_exception());
//   }
absl::Status StatusFromException(std::exception_ptr exception);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TENSOR_EXCEPTION_H_
