// Keeps the origin of an error as a payload of its status.
#include "core/base/origin.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace distgrad {
namespace {

// Statuses show their payloads where they are printed, so it is text: "handler of worker 3".
constexpr absl::string_view kUrl = "distgrad.origin";
constexpr absl::string_view kHandlerOf = "handler of worker ";
constexpr absl::string_view kWorker = "worker ";

}  // namespace

std::optional<ErrorOrigin> OriginOf(const absl::Status& status) {
  const std::optional<absl::Cord> payload = status.GetPayload(kUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  absl::string_view rest = text;
  ErrorOrigin origin;
  if (absl::ConsumePrefix(&rest, kHandlerOf)) {
    origin.by = ErrorOrigin::By::kHandler;
  } else if (!absl::ConsumePrefix(&rest, kWorker)) {
    return std::nullopt;
  }
  uint32_t worker = 0;
  if (!absl::SimpleAtoi(rest, &worker) || worker > UINT16_MAX) return std::nullopt;
  origin.worker = static_cast<WorkerRank>(worker);
  return origin;
}

absl::Status WithOrigin(absl::Status status, ErrorOrigin origin) {
  if (status.ok() || OriginOf(status).has_value()) return status;
  const bool by_handler = origin.by == ErrorOrigin::By::kHandler;
  status.SetPayload(kUrl,
                    absl::Cord(absl::StrCat(by_handler ? kHandlerOf : kWorker, origin.worker)));
  return status;
}

}  // namespace distgrad
