// Reads and writes JSON without trust in it.
#include "core/checkpoint/job/json_text.h"

#include <stdexcept>

#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;

// What is deep takes much more memory than text.
constexpr int kMaxDepth = 8;

}  // namespace

bool IsUtf8(const std::string& text) {
  try {
    Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

absl::StatusOr<Json> ParseJson(absl::string_view text) {
  bool too_deep = false;
  Json json = Json::parse(
      text.begin(), text.end(),
      [&](int depth, Json::parse_event_t, Json&) {
        too_deep |= depth > kMaxDepth;
        return !too_deep;
      },
      /*allow_exceptions=*/false);
  if (too_deep || json.is_discarded()) return absl::InvalidArgumentError("it is no such JSON");
  return json;
}

absl::StatusOr<std::string> JsonText(const Json& json) {
  try {
    return json.dump();
  } catch (const Json::exception&) {
    return absl::InvalidArgumentError("a name is not UTF-8");
  }
}

uint64_t WholeUpTo(uint64_t most, const Json& json) {
  if (!json.is_number_unsigned() || json.get<uint64_t>() > most) {
    throw std::invalid_argument("no such number");
  }
  return json.get<uint64_t>();
}

}  // namespace distgrad
