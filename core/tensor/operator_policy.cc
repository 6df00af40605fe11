// Has the list of operators that touch more than their tensors.
#include "core/tensor/operator_policy.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace distgrad {
namespace {

// Found by reading the names of all that libtorch 2.11 registers under "aten" and does not begin
// with "_". operator_policy_test.cc looks for new ones.
constexpr absl::string_view kImpure[] = {
    "from_file",      // maps a file into memory, and can make one
    "record_stream",  // keeps memory of an accelerator
    "set_",           // takes another's storage
    "set_data",      "set", "resize_storage_bytes_", "resize_storage_bytes",
};

}  // namespace

absl::Status CheckPure(absl::string_view name) {
  absl::string_view base = name.substr(0, name.find('.'));
  const bool pure = absl::ConsumePrefix(&base, "aten::") &&
                    (!absl::StartsWith(base, "_") || absl::StartsWith(base, "_foreach_") ||
                     absl::StartsWith(base, "__")) &&
                    std::find(std::begin(kImpure), std::end(kImpure), base) == std::end(kImpure);
  if (pure) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("operator ", name.substr(0, 100), " does more than compute"));
}

}  // namespace distgrad
