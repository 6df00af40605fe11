// Takes apart the names of an optimizer's state.
#include "core/checkpoint/state_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace distgrad {
namespace {

constexpr absl::string_view kState = "state.";

}  // namespace

std::string StateName::Text() const { return absl::StrCat(kState, parameter, ".", entry); }

std::optional<StateName> ParseStateName(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, kState)) return std::nullopt;
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos || !IsStateWord(name.substr(dot + 1))) return std::nullopt;
  return StateName{std::string(name.substr(0, dot)), std::string(name.substr(dot + 1))};
}

bool IsStateWord(absl::string_view text) {
  return text.size() <= 100 && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
         });
}

}  // namespace distgrad
