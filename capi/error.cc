// Implements the version, strings, errors and the log, and what guard.h declares.
#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "capi/guard.h"
#include "capi/objects.h"
#include "core/base/blocking.h"
#include "core/base/log.h"
#include "core/base/origin.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/worker/failure.h"

namespace distgrad {
namespace {

static_assert(static_cast<uint32_t>(LogSeverity::kINFO) == DG_LOG_INFO);
static_assert(static_cast<uint32_t>(LogSeverity::kWARNING) == DG_LOG_WARNING);
static_assert(static_cast<uint32_t>(LogSeverity::kERROR) == DG_LOG_ERROR);
static_assert(static_cast<uint32_t>(ErrorOrigin::By::kDistgrad) == DG_ORIGIN_DISTGRAD);
static_assert(static_cast<uint32_t>(ErrorOrigin::By::kHandler) == DG_ORIGIN_HANDLER);

constexpr absl::Duration kNoLimit = absl::Hours(24 * 365 * 10);
// No struct of options comes near; a larger size is a program's mistake.
constexpr size_t kMaxOptionsSize = 4096;
constexpr size_t kMaxSize = PTRDIFF_MAX;  // of any array, or string

// Stands for an error that there was no memory for.
struct dg_error* OutOfMemory() {
  return reinterpret_cast<dg_error*>(~uintptr_t{0});
}

thread_local int no_wait_scopes = 0;

}  // namespace

absl::StatusCode ToStatusCode(dg_code code) {
  const bool known = code > DG_OK && code <= DG_UNAUTHENTICATED;
  return known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

dg_error* ToError(const absl::Status& status) noexcept {
  if (status.ok()) return nullptr;
  try {
    return NewHandle<ErrorObject>(status);
  } catch (...) {
    return OutOfMemory();
  }
}

absl::Status TakeError(dg_error* error) noexcept {
  if (error == nullptr) return absl::OkStatus();
  if (error == OutOfMemory()) return absl::ResourceExhaustedError("");
  absl::StatusOr<std::unique_ptr<ErrorObject>> taken = TakeHandle<ErrorObject>(error, "error");
  if (taken.ok()) return (*taken)->status;
  return absl::InternalError("a callback returned something that is not a dg_error");
}

absl::Status CheckArray(const void* data, size_t size, absl::string_view what) {
  if (size > kMaxSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("the size of ", what, " is ", size, ", which is more than memory can have"));
  }
  if (size == 0 || data != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is NULL, and its size is ", size));
}

absl::StatusOr<std::string> FromStr(dg_str text, absl::string_view what) {
  DG_RETURN_IF_ERROR(CheckArray(text.data, text.size, what));
  return text.size == 0 ? std::string() : std::string(text.data, text.size);
}

absl::StatusOr<std::vector<std::string>> FromStrs(const dg_str* texts, size_t count,
                                                  absl::string_view name) {
  DG_RETURN_IF_ERROR(CheckArray(texts, count, name));
  std::vector<std::string> all;
  for (size_t i = 0; i < count; ++i) {
    DG_ASSIGN_OR_RETURN(all.emplace_back(), FromStr(texts[i], absl::StrCat(name, "[", i, "]")));
  }
  return all;
}

absl::Status CheckOut(const void* out, absl::string_view name) {
  if (out != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ", where a result is to be stored, is NULL"));
}

absl::Status CheckCallback(bool is_there, absl::string_view name) {
  if (is_there) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ", the function that is to be called, is NULL"));
}

absl::Duration ToTimeout(int64_t timeout_ms, absl::Duration if_zero) {
  if (timeout_ms == 0) return if_zero;
  return timeout_ms < 0 ? kNoLimit : std::min(absl::Milliseconds(timeout_ms), kNoLimit);
}

Deadline ToDeadline(int64_t timeout_ms, Deadline if_zero) {
  return timeout_ms == 0 ? if_zero : Deadline::After(ToTimeout(timeout_ms, {}));
}

int64_t ToTimeoutMs(Deadline deadline) {
  const absl::Duration left = deadline.Left();
  // Of what was no limit, some has passed since.
  if (left > kNoLimit / 2) return DG_FOREVER;
  return std::max(int64_t{1}, absl::ToInt64Milliseconds(left));
}

absl::Status CheckOptionsSize(size_t given, size_t first, size_t known, const void* options,
                              absl::string_view name) {
  if (given < first || given > kMaxOptionsSize) {
    return absl::InvalidArgumentError(absl::StrCat(name, ".struct_size is ", given, ", not ", known,
                                                   ": start from its ..._INIT macro"));
  }
  const char* bytes = static_cast<const char*>(options);
  if (given > known &&
      std::any_of(bytes + known, bytes + given, [](char byte) { return byte != 0; })) {
    return absl::UnimplementedError(
        absl::StrCat(name, " sets something that this version of the library does not know"));
  }
  return absl::OkStatus();
}

absl::Status CheckFlags(uint64_t flags, uint64_t known, absl::string_view name) {
  if ((flags & ~known) == 0) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(name, " has bits that this version of the library does not know"));
}

NoWaitScope::NoWaitScope() : grad_enabled_(at::GradMode::is_enabled()) { ++no_wait_scopes; }
NoWaitScope::~NoWaitScope() {
  --no_wait_scopes;
  at::GradMode::set_enabled(grad_enabled_);
}

bool MayWait() { return no_wait_scopes == 0; }

absl::Status CheckMayWait() {
  if (MayWait()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this waits, which a future's callback and a destructor must not");
}

absl::Status internal::StartClosing(absl::AnyInvocable<void()> end) {
  DG_ASSIGN_OR_RETURN(std::thread thread, StartThread("dg-close", std::move(end)));
  thread.detach();
  return absl::OkStatus();
}

UserData::~UserData() {
  if (destroy_ == nullptr) return;
  NoWaitScope scope;
  destroy_(data_);
}

}  // namespace distgrad

using namespace distgrad;

extern "C" {

uint32_t dg_abi_version(void) noexcept {
  return uint32_t{DG_ABI_MAJOR} << 16 | uint32_t{DG_ABI_MINOR};
}

dg_str dg_torch_version(void) noexcept { return ToStr(TORCH_VERSION); }

dg_error* dg_error_create(dg_code code, dg_str message) noexcept {
  return Guard([&]() -> absl::Status {
    absl::StatusOr<std::string> text = FromStr(message, "message");
    return absl::Status(ToStatusCode(code), text.ok() ? *text : "");
  });
}

dg_error* dg_error_create_with_origin(dg_code code, dg_str message, uint32_t origin,
                                      uint32_t rank) noexcept {
  return Guard([&]() -> absl::Status {
    absl::StatusOr<std::string> text = FromStr(message, "message");
    absl::Status status(ToStatusCode(code), text.ok() ? *text : "");
    if ((origin != DG_ORIGIN_DISTGRAD && origin != DG_ORIGIN_HANDLER) || rank > UINT16_MAX) {
      return status;
    }
    return WithOrigin(std::move(status),
                      {static_cast<WorkerRank>(rank), static_cast<ErrorOrigin::By>(origin)});
  });
}

uint32_t dg_error_origin(const dg_error* error, uint32_t* rank) noexcept {
  if (error == nullptr || error == OutOfMemory()) return DG_ORIGIN_NONE;
  return GuardValue<uint32_t>(DG_ORIGIN_NONE, [&]() -> uint32_t {
    absl::StatusOr<Pinned<ErrorObject>> pinned = Pin<ErrorObject>(error, "error");
    if (!pinned.ok()) return DG_ORIGIN_NONE;
    const std::optional<ErrorOrigin> origin = OriginOf((*pinned)->status);
    if (!origin.has_value()) return DG_ORIGIN_NONE;
    if (rank != nullptr) *rank = origin->worker;
    return static_cast<uint32_t>(origin->by);
  });
}

void dg_error_destroy(dg_error* error) noexcept { DestroyHandle<ErrorObject>(error); }

dg_code dg_error_code(const dg_error* error) noexcept {
  if (error == nullptr) return DG_OK;
  if (error == OutOfMemory()) return DG_RESOURCE_EXHAUSTED;
  return GuardValue<dg_code>(DG_INVALID_ARGUMENT, [&]() -> dg_code {
    absl::StatusOr<Pinned<ErrorObject>> pinned = Pin<ErrorObject>(error, "error");
    if (!pinned.ok()) return DG_INVALID_ARGUMENT;
    return static_cast<dg_code>((*pinned)->status.code());
  });
}

dg_str dg_error_message(const dg_error* error) noexcept {
  if (error == nullptr) return ToStr("");
  if (error == OutOfMemory()) return ToStr("out of memory");
  return GuardValue<dg_str>(ToStr(""), [&] {
    absl::StatusOr<Pinned<ErrorObject>> pinned = Pin<ErrorObject>(error, "error");
    return pinned.ok() ? ToStr((*pinned)->status.message()) : ToStr("not a dg_error");
  });
}

dg_error* dg_log_set_sink(void (*sink)(void* user_data, uint32_t severity, dg_str text),
                          void* user_data, void (*destroy)(void* user_data)) noexcept {
  UserData taken(user_data, destroy);
  return Guard([&]() -> absl::Status {
    const BlockingScope blocking;
    if (sink == nullptr) {
      SetLogSink(nullptr);
      return absl::OkStatus();
    }
    const auto kept = std::make_shared<const UserData>(std::move(taken));
    SetLogSink([sink, kept](LogSeverity severity, absl::string_view text) {
      NoWaitScope scope;
      sink(kept->get(), static_cast<uint32_t>(severity), ToStr(text));
    });
    return absl::OkStatus();
  });
}

dg_error* dg_report_failure(dg_code code, dg_str message) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const std::string text, FromStr(message, "message"));
    return ReportFailure(absl::Status(ToStatusCode(code), text));
  });
}

}  // extern "C"
