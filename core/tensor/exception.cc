// Finds the code for each kind of exception that libtorch throws.
#include "core/tensor/exception.h"

#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "core/base/exception.h"

namespace distgrad {
namespace {

absl::StatusCode CodeOf(const c10::Error& error) {
  if (const auto* ours = dynamic_cast<const StatusError*>(&error)) return ours->status().code();
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr ||
      dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
      dynamic_cast<const c10::TypeError*>(&error) != nullptr) {
    return absl::StatusCode::kInvalidArgument;
  }
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) {
    return absl::StatusCode::kUnimplemented;
  }
  // libtorch's CPU allocator throws no OutOfMemoryError; only its text tells.
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      absl::StrContains(error.what_without_backtrace(), "can't allocate memory")) {
    return absl::StatusCode::kResourceExhausted;
  }
  return absl::StatusCode::kInternal;
}

}  // namespace

StatusError::StatusError(absl::Status status)
    : c10::Error({__func__, __FILE__, __LINE__}, std::string(status.message())),
      status_(std::move(status)) {}

absl::Status StatusFromException(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& e) {
    try {
      absl::Status status(CodeOf(e), e.what_without_backtrace());
      if (const auto* ours = dynamic_cast<const StatusError*>(&e)) {
        ours->status().ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
          status.SetPayload(url, payload);
        });
      }
      return status;
    } catch (...) {  // there is no memory for it
      return StatusFromStdException(std::current_exception());
    }
  } catch (...) {
    return StatusFromStdException(std::move(exception));
  }
}

}  // namespace distgrad
