// Suggestions for errors about a name that is not there: the names that are near to it.
#ifndef DISTGRAD_CORE_BASE_NEAR_NAMES_H_
#define DISTGRAD_CORE_BASE_NEAR_NAMES_H_

#include <cstddef>
#include <set>
#include <string>

#include "absl/strings/string_view.h"

namespace distgrad {

// Longer ones have no near names: the search takes time that grows with the square of the length.
inline constexpr size_t kMaxNearName = 100;  // bytes

// Whether at most two letters have to be changed, added or left out to make one of the other.
bool IsNearName(absl::string_view a, absl::string_view b);

// "a, b, c", or eight of them and ", ..." where there are more.
std::string FirstNames(const std::set<std::string>& names);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_NEAR_NAMES_H_
