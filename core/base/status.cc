// Puts context before the message of an error.
#include "core/base/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace distgrad {

absl::Status Annotate(const absl::Status& status, absl::string_view what) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace distgrad
