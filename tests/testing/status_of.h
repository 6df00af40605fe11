// What a call that may throw says, as a Status.
#ifndef DISTGRAD_TESTS_TESTING_STATUS_OF_H_
#define DISTGRAD_TESTS_TESTING_STATUS_OF_H_

#include <exception>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "core/tensor/exception.h"

namespace distgrad {

inline absl::Status StatusOf(absl::FunctionRef<void()> run) {
  try {
    run();
    return absl::OkStatus();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_STATUS_OF_H_
