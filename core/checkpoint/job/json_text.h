// JSON of manifests and messages, which may come from anybody.
#ifndef DISTGRAD_CORE_CHECKPOINT_JOB_JSON_TEXT_H_
#define DISTGRAD_CORE_CHECKPOINT_JOB_JSON_TEXT_H_

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace distgrad {

// Whether it can be a string of JSON.
bool IsUtf8(const std::string& text);

// kInvalidArgument if it is no JSON, or nested more than a few levels deep.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text);
// kInvalidArgument for a string that is not UTF-8.
absl::StatusOr<std::string> JsonText(const nlohmann::json& json);

// A whole number that is not negative. Throws, as nlohmann's own do, for what is another thing, or
// more: nlohmann itself converts any number to any other.
uint64_t WholeUpTo(uint64_t most, const nlohmann::json& json);
template <typename T>
T Whole(const nlohmann::json& json) {
  return static_cast<T>(WholeUpTo(static_cast<uint64_t>(std::numeric_limits<T>::max()), json));
}

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_JOB_JSON_TEXT_H_
