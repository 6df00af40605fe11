// The guard at the border of each function of the C interface: no exception leaves it, its
// arguments are checked, and callbacks run in their scope.
#ifndef DISTGRAD_CAPI_GUARD_H_
#define DISTGRAD_CAPI_GUARD_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "capi/handles.h"
#include "capi/include/distgrad/distgrad.h"
#include "core/base/blocking.h"
#include "core/base/deadline.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"

namespace distgrad {

// -------------------------------------------------------------------------------------- Errors

// Returns NULL for an OK status. Never throws: if memory is out, the error says so and needs none.
dg_error* ToError(const absl::Status& status) noexcept;

// Returns kUnknown for what is no code of an error.
absl::StatusCode ToStatusCode(dg_code code);

// Takes an error that a callback returned; what is not a valid handle is an error too.
absl::Status TakeError(dg_error* error) noexcept;

// Runs `body`, which returns a Status, and lets nothing through but its error.
template <typename F>
dg_error* Guard(F&& body) noexcept {
  try {
    return ToError(body());
  } catch (...) {
    return ToError(StatusFromException(std::current_exception()));
  }
}

// Runs `body` of a function that cannot return an error: `fallback` instead.
template <typename T, typename F>
T GuardValue(T fallback, F&& body) noexcept {
  try {
    return body();
  } catch (...) {
    return fallback;
  }
}

// ----------------------------------------------------------------------------------- Arguments

inline dg_str ToStr(absl::string_view text) { return {text.data(), text.size()}; }

// Checks that `data`, of `size` elements, is there if size > 0, and that some memory could hold so
// many. `what` is the name of the parameter or field.
absl::Status CheckArray(const void* data, size_t size, absl::string_view what);

absl::StatusOr<std::string> FromStr(dg_str text, absl::string_view what);
// `name` is that of the parameter or field: an error names the string with its index.
absl::StatusOr<std::vector<std::string>> FromStrs(const dg_str* texts, size_t count,
                                                  absl::string_view name);

// `name` is that of the parameter.
absl::Status CheckOut(const void* out, absl::string_view name = "out");
absl::Status CheckCallback(bool is_there, absl::string_view name);

// Returns timeout_ms, or `if_zero` for 0. Negative is as good as no limit.
absl::Duration ToTimeout(int64_t timeout_ms, absl::Duration if_zero);

// Returns now plus timeout_ms, in the same way.
Deadline ToDeadline(int64_t timeout_ms, Deadline if_zero);

// Returns the milliseconds left until then, at least 1; DG_FOREVER where there is no limit.
int64_t ToTimeoutMs(Deadline deadline);

absl::Status CheckOptionsSize(size_t given, size_t first, size_t known, const void* options,
                              absl::string_view name);

// A struct of options of any version from the first on, when it had `first_size` bytes: fields that
// it lacks are as in `defaults`. Unknown ones must be zero.
template <typename T>
absl::StatusOr<T> ReadOptions(const T* options, const T& defaults, absl::string_view name,
                              size_t first_size = sizeof(T)) {
  T read = defaults;
  if (options != nullptr) {
    DG_RETURN_IF_ERROR(
        CheckOptionsSize(options->struct_size, first_size, sizeof(T), options, name));
    std::memcpy(&read, options, std::min(options->struct_size, sizeof(T)));
  }
  return read;
}

// `name` is that of the parameter or field.
absl::Status CheckFlags(uint64_t flags, uint64_t known, absl::string_view name);

// ----------------------------------------------------------------------------------- Callbacks

// The scope of a callback, on this thread, that must not wait. What the callback does to the
// thread's gradient mode is undone.
class NoWaitScope {
 public:
  NoWaitScope();
  ~NoWaitScope();
  NoWaitScope(const NoWaitScope&) = delete;
  NoWaitScope& operator=(const NoWaitScope&) = delete;

 private:
  const bool grad_enabled_;
};

// Returns whether this thread is in no NoWaitScope.
bool MayWait();
// Returns kFailedPrecondition inside a NoWaitScope.
absl::Status CheckMayWait();

namespace internal {
// Throws if memory is out.
absl::Status StartClosing(absl::AnyInvocable<void()> end);
}  // namespace internal

// Calls `end` on a thread of its own, where this one must not wait. It owns what it ends: so no
// owner is left to join it. An error, and nothing is called, if there is no thread to be had.
template <typename F>
absl::Status EndInBackground(F end) noexcept {
  try {
    return internal::StartClosing(std::move(end));
  } catch (const std::bad_alloc&) {
    return StatusFromException(std::current_exception());
  }
}

// Lets go of what may wait when it ends: here, or on a thread of its own, where this one must not
// wait. If there is none to be had it ends here all the same.
template <typename T>
void EndWherePossible(std::shared_ptr<T> last) noexcept {
  if (last == nullptr) return;
  if (MayWait()) {
    const BlockingScope blocking;
    last = nullptr;
  } else {
    EndInBackground([last = std::move(last)] {}).IgnoreError();
  }
}

// A caller's user_data with its destructor, which runs exactly once. Movable.
class UserData {
 public:
  UserData(void* data, void (*destroy)(void*)) : data_(data), destroy_(destroy) {}
  UserData(UserData&& other) noexcept
      : data_(other.data_), destroy_(std::exchange(other.destroy_, nullptr)) {}
  UserData& operator=(UserData&&) = delete;
  ~UserData();

  void* get() const { return data_; }

 private:
  void* const data_;
  void (*destroy_)(void*);
};

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_GUARD_H_
