// Compares names by the least number of letters that differ.
#include "core/base/near_names.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {

bool IsNearName(absl::string_view a, absl::string_view b) {
  constexpr size_t kNear = 2;
  if (std::max(a.size(), b.size()) > kMaxNearName) return false;
  if (a.size() > b.size() + kNear || b.size() > a.size() + kNear) return false;
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back() <= kNear;
}

std::string FirstNames(const std::set<std::string>& names) {
  constexpr size_t kShown = 8;
  std::vector<absl::string_view> shown(names.begin(), names.end());
  const bool is_cut = shown.size() > kShown;
  if (is_cut) shown.resize(kShown);
  return absl::StrCat(absl::StrJoin(shown, ", "), is_cut ? ", ..." : "");
}

}  // namespace distgrad
