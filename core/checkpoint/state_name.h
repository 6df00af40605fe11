// The names that an optimizer's state has in a file: "state.PARAMETER.exp_avg".
#ifndef DISTGRAD_CORE_CHECKPOINT_STATE_NAME_H_
#define DISTGRAD_CORE_CHECKPOINT_STATE_NAME_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace distgrad {

struct StateName {
  std::string parameter;  // may have dots in it
  std::string entry;      // "exp_avg": letters, digits and '_'

  std::string Text() const;
};

// Nothing for a name that is none of a state.
std::optional<StateName> ParseStateName(absl::string_view name);

// Whether it is a word of letters, digits and '_', and not a long one, as names of entries and
// options are.
bool IsStateWord(absl::string_view text);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_CHECKPOINT_STATE_NAME_H_
