// Waits for keys to change in a store that cannot wait itself, by asking it again and again.
#include "core/membership/store.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"

namespace distgrad {

absl::StatusOr<std::vector<Store::Value>> Store::AwaitChange(Keys keys,
                                                             absl::Span<const Value> seen,
                                                             Deadline deadline) {
  Backoff backoff(deadline);
  for (;;) {
    DG_ASSIGN_OR_RETURN(std::vector<Value> values, GetEach(keys, deadline));
    if (!std::equal(values.begin(), values.end(), seen.begin(), seen.end()) || !backoff.Sleep()) {
      return values;
    }
  }
}

absl::StatusOr<std::string> Store::Get(const std::string& key, Deadline deadline) {
  const std::string keys[] = {key};
  const Value nothing[] = {std::nullopt};
  DG_ASSIGN_OR_RETURN(std::vector<Value> values, AwaitChange(keys, nothing, deadline));
  if (values[0].has_value()) return *std::move(values[0]);
  return absl::NotFoundError(
      absl::StrCat("nobody set \"", absl::CHexEscape(key), "\" in the job's store in time"));
}

}  // namespace distgrad
