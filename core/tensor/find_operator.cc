// Asks libtorch's dispatcher.
#include "core/tensor/find_operator.h"

#include <cstddef>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/near_names.h"

namespace distgrad {
namespace {

absl::Status NotFound(absl::string_view name, const c10::OperatorName& wanted) {
  std::set<std::string> overloads;
  std::set<std::string> near;
  if (wanted.name.size() <= kMaxNearName) {
    for (const c10::OperatorName& other : c10::Dispatcher::singleton().getAllOpNames()) {
      if (other.name == wanted.name) {
        overloads.insert(NameOf(other));
      } else if (IsNearName(other.name, wanted.name)) {
        near.insert(other.name);
      }
    }
  }
  const std::string shown = FirstNames(overloads.empty() ? near : overloads);
  return absl::NotFoundError(absl::StrCat("no operator ", name.substr(0, kMaxNearName),
                                          " is registered", shown.empty() ? "" : "; there is ",
                                          shown));
}

}  // namespace

absl::StatusOr<c10::OperatorHandle> FindOperator(absl::string_view name) {
  const size_t colons = name.find("::");
  if (colons == absl::string_view::npos) {
    return absl::NotFoundError(absl::StrCat("no operator ", name.substr(0, 100),
                                            ": a name needs its namespace, as in aten::mm"));
  }
  const size_t dot = name.find('.', colons);
  c10::OperatorName wanted(std::string(name.substr(0, dot)),
                           dot == absl::string_view::npos ? "" : std::string(name.substr(dot + 1)));
  // One name for each operator: a check that knows one by its name is not to be passed by another.
  if (dot != absl::string_view::npos && wanted.overload_name.empty()) return NotFound(name, wanted);
  std::optional<c10::OperatorHandle> found = c10::Dispatcher::singleton().findSchema(wanted);
  if (!found.has_value()) return NotFound(name, wanted);
  return *found;
}

std::string NameOf(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : absl::StrCat(name.name, ".", name.overload_name);
}

}  // namespace distgrad
