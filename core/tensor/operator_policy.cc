// Has the list of operators that touch more than their tensors.
#include "core/tensor/operator_policy.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "core/base/status.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/served_operators.h"

namespace distgrad {
namespace {

// Found by reading the names of all that libtorch 2.11 registers under "aten" and does not begin
// with "_". operator_schemas_test.cc looks for new ones.
constexpr absl::string_view kUnsafe[] = {
    "from_file",      // maps a file into memory, and can make one
    "record_stream",  // keeps memory of an accelerator
    "set_",           // takes another's storage
    "set_data",
    "set",
    "resize_storage_bytes_",
    "resize_storage_bytes",
    // These make an object of this process, in memory that no limit sees.
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
};

// Those whose kernels on the CPU take on trust that their arguments fit together, or that indices
// are in range: called with some that are not, they read or write outside of their tensors, make a
// sparse tensor that leads other operators there, or go on for minutes. Found by
// operator_schemas_test.cc and operator_memory_test.cc, which call all the others. With their
// overload, where others have no such flaw.
constexpr absl::string_view kTrusting[] = {
    "_foreach_copy",
    "_foreach_lerp",
    "_foreach_lerp_",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "align_tensors",
    "align_to.ellipsis_idx",
    "batch_norm_backward",
    "batch_norm_update_stats",
    "choose_qparams_optimized",
    "ctc_loss",
    "embedding_backward",
    "embedding_bag",
    "embedding_dense_backward",
    "embedding_sparse_backward",
    "fbgemm_linear_quantize_weight",
    "fractional_max_pool2d",  // of its random samples, which are an argument, it takes any
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d",
    "fractional_max_pool3d_backward",
    "fused_moving_avg_obs_fake_quant",
    "gather_backward",
    "gru",  // these take the number of gates from the sizes of weights
    "gru_cell",
    "linalg_eigvals",
    "linalg_ldl_solve",
    "linalg_slogdet.out",
    "log_sigmoid.out",  // these write a result of another dtype as if it were the input's
    "log_sigmoid_forward.output",
    "lstm",
    "lstm_cell",
    "lu_unpack",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "native_batch_norm",  // batch_norm checks what it hands to it
    "native_batch_norm_backward",
    "native_channel_shuffle",  // divides by the number of groups, which channel_shuffle checks
    "native_group_norm",       // group_norm checks what it hands to it
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "nll_loss_backward",
    "pdist",
    "quantized_gru",
    "quantized_gru_cell",
    "quantized_lstm",
    "quantized_lstm_cell",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d",
    "repeat_interleave.Tensor",  // of negative repeats it notices the first one too late
    "repeat_interleave.Tensor_out",
    "repeat_interleave.self_Tensor",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "rnn_relu.data",  // these take the sizes of batches from a tensor
    "rnn_tanh.data",
    "rrelu_with_noise.out",
    "segment_reduce",
    "slow_conv3d",
    "slow_conv3d_forward",
    "smooth_l1_loss_backward",  // of integers it divides by none
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor.indices_size",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
    "unfold_backward",
};

// Those whose results share memory with an argument and not its version counter: a backward that
// has saved the argument would not notice what is written to the result. Found by
// operator_schemas_test.cc.
constexpr absl::string_view kHiding[] = {
    "data",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
};

bool IsOneOf(absl::Span<const absl::string_view> list, absl::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

absl::Status CheckSafe(absl::string_view name) {
  absl::string_view full = name;
  const bool of_libtorch = absl::ConsumePrefix(&full, "aten::");
  const absl::string_view base = full.substr(0, full.find('.'));
  if (of_libtorch && (IsOneOf(kTrusting, full) || IsOneOf(kTrusting, base))) {
    return absl::PermissionDeniedError(
        absl::StrCat("operator ", name.substr(0, 100),
                     " does not check that its arguments fit together, and may write to memory "
                     "outside of them"));
  }
  if (of_libtorch && IsOneOf(kHiding, base)) {
    return absl::PermissionDeniedError(
        absl::StrCat("operator ", name.substr(0, 100),
                     " gives memory of its argument's to which it could be written unnoticed by "
                     "a backward"));
  }
  const bool safe = of_libtorch &&
                    (!absl::StartsWith(base, "_") || absl::StartsWith(base, "_foreach_") ||
                     absl::StartsWith(base, "__")) &&
                    !IsOneOf(kUnsafe, base);
  if (safe) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("operator ", name.substr(0, 100), " does more than compute"));
}

absl::Status CheckServed(const c10::OperatorHandle& op) {
  const std::string name = NameOf(op);
  DG_RETURN_IF_ERROR(CheckSafe(name));
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const bool takes_result = std::any_of(arguments.begin(), arguments.end(),
                                        [](const c10::Argument& each) { return each.is_out(); });
  if (IsListed(op.operator_name().name) && !takes_result) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      "operator ", name, " is not on the list of those that workers serve to each other"));
}

}  // namespace distgrad
