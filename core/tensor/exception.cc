#include "core/tensor/exception.h"

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

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
    std::rethrow_exception(std::move(exception));
  } catch (const c10::Error& e) {
    return absl::Status(CodeOf(e), e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::out_of_range& e) {
    return absl::InvalidArgumentError(e.what());
  } catch (const std::invalid_argument& e) {
    return absl::InvalidArgumentError(e.what());
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  } catch (...) {
    return absl::InternalError("something was thrown that is not a std::exception");
  }
}

}  // namespace distgrad
