// Small helpers over absl::Status: how an error is passed on, and how it grows by context.
//
//   absl::Status Load(const std::string& path) {
//     DG_ASSIGN_OR_RETURN(std::string text, Read(path));
//     DG_RETURN_IF_ERROR(Annotate(Parse(text), absl::StrCat("parsing ", path)));
//     return absl::OkStatus();
//   }
#ifndef DISTGRAD_CORE_BASE_STATUS_H_
#define DISTGRAD_CORE_BASE_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// "<what>: <message>" with the same code and payloads; an OK status stays as it is.
absl::Status Annotate(const absl::Status& status, absl::string_view what);

}  // namespace distgrad

// Returns the error of `expr` (a Status) from the function that this stands in, if it is one.
#define DG_RETURN_IF_ERROR(expr)                              \
  do {                                                        \
    if (::absl::Status dg_status = (expr); !dg_status.ok()) { \
      return dg_status;                                       \
    }                                                         \
  } while (false)

// Assigns the value of `expr` (a StatusOr) to `lhs`, which may be a declaration, or returns its
// error. Two statements: not for the body of an `if` without braces.
#define DG_ASSIGN_OR_RETURN(lhs, ...) \
  DG_ASSIGN_OR_RETURN_NAMED_(DG_CONCAT_(dg_result_, __LINE__), lhs, (__VA_ARGS__))

#define DG_ASSIGN_OR_RETURN_NAMED_(result, lhs, expr) \
  auto result = expr;                                 \
  if (!result.ok()) return result.status();           \
  lhs = *std::move(result)
#define DG_CONCAT_(a, b) DG_CONCAT_INNER_(a, b)
#define DG_CONCAT_INNER_(a, b) a##b

#endif  // DISTGRAD_CORE_BASE_STATUS_H_
