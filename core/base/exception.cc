// Converts exceptions of the standard library, and logs what a callback throws.
#include "core/base/exception.h"

#include <new>
#include <stdexcept>
#include <utility>

#include "core/base/log.h"

namespace distgrad {
namespace {

// Made before main(), for later there may be no memory for it.
const absl::Status* const kOutOfMemory =
    new absl::Status(absl::ResourceExhaustedError("out of memory"));

}  // namespace

absl::Status StatusFromStdException(std::exception_ptr exception) {
  // What a handler below throws, where there is no memory for a text, is bad_alloc, too.
  try {
    try {
      std::rethrow_exception(std::move(exception));
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::out_of_range& e) {
      return absl::InvalidArgumentError(e.what());
    } catch (const std::invalid_argument& e) {
      return absl::InvalidArgumentError(e.what());
    } catch (const std::length_error& e) {  // of a size that no memory can have
      return absl::InvalidArgumentError(e.what());
    } catch (const std::exception& e) {
      return absl::InternalError(e.what());
    } catch (...) {
      return absl::InternalError("something was thrown that is not a std::exception");
    }
  } catch (const std::bad_alloc&) {
    return *kOutOfMemory;
  }
}

void LogThrown(absl::string_view who) {
  DG_LOG(ERROR) << who
                << " has thrown: " << StatusFromStdException(std::current_exception()).message();
}

}  // namespace distgrad
