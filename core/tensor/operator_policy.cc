// Has the list of operators that touch more than their tensors.
#include "core/tensor/operator_policy.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"

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

// Those whose kernels on the CPU take on trust that their arguments fit together: called with some
// that do not, they read or write outside of their tensors, or go on for minutes. Found by
// operator_schemas_test.cc, which calls all the others. With their overload, where others have no
// such flaw.
constexpr absl::string_view kTrusting[] = {
    "_foreach_copy",
    "align_tensors",
    "align_to.ellipsis_idx",
    "batch_norm_backward",
    "choose_qparams_optimized",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "linalg_ldl_solve",
    "lstm.data",
    "native_batch_norm",  // batch_norm checks what it hands to it
    "native_batch_norm_backward",
    "quantized_lstm_cell",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d",
    "rrelu_with_noise.out",
    "slow_conv3d",
    "slow_conv3d_forward",
};

bool IsOneOf(absl::Span<const absl::string_view> list, absl::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

absl::Status CheckPure(absl::string_view name) {
  absl::string_view full = name;
  const bool of_libtorch = absl::ConsumePrefix(&full, "aten::");
  const absl::string_view base = full.substr(0, full.find('.'));
  if (of_libtorch && (IsOneOf(kTrusting, full) || IsOneOf(kTrusting, base))) {
    return absl::PermissionDeniedError(
        absl::StrCat("operator ", name.substr(0, 100),
                     " does not check that its arguments fit together, and may write to memory "
                     "outside of them"));
  }
  const bool pure = of_libtorch &&
                    (!absl::StartsWith(base, "_") || absl::StartsWith(base, "_foreach_") ||
                     absl::StartsWith(base, "__")) &&
                    !IsOneOf(kImpure, base);
  if (pure) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("operator ", name.substr(0, 100), " does more than compute"));
}

}  // namespace distgrad
