// The list of operators that were reviewed, in groups of what their kernels have in common.
#include "core/tensor/served_operators.h"

#include <cstddef>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"

namespace distgrad {
namespace {

// Before a name is added here:
//
//   - read its kernel for the CPU, and those that it calls: whether sizes, indices, lists and
//     numbers are checked before memory is read or written by them; whether integers are divided by
//     what a caller gives, or by a product that may wrap around or be 0 without elements; what it
//     allocates beside the elements of its results; how often it calls itself; and the same of its
//     derivative;
//   - look through libtorch's issues for "segmentation fault", "floating point exception" and
//     "heap-buffer-overflow" of it;
//   - and run the searches for it alone, with some seeds (operator_schemas_test.cc,
//     operator_memory_test.cc).
//
// The first names were chosen for libtorch 2.11 by what was known of their kernels, by its issues,
// by the searches and by 27,000 calls with hostile numbers, sizes and indices to the groups of
// which most was to be feared; not every kernel's source was read again for it.
//
// What only some numbers end is refused by number_check.h and piece_count.h, and an overload that
// is unsafe by operator_policy.cc; both are asked for what is listed here, too. Nothing is here
// because it might be of use: only what models are trained with.

// Arithmetic of each element, and of elements that are broadcast together. The kernels go over
// their tensors with a TensorIterator, which computes sizes and strides by itself and checks that
// they fit. Integers are divided by `div`, `floor_divide`, `remainder` and `fmod` only: a divisor
// of 0 is an error of libtorch's, and number_check.h refuses the one quotient that is no number.
// `addcdiv` refuses to divide integers, `pow` does not divide.
constexpr absl::string_view kElementwise[] = {
    "__and__",     "__iand__",    "__ior__",      "__ixor__",    "__or__",     "__xor__",
    "abs",         "absolute",    "add",          "addcdiv",     "addcmul",    "angle",
    "arctan2",     "atan2",       "bitwise_and",  "bitwise_not", "bitwise_or", "bitwise_xor",
    "ceil",        "clamp",       "clamp_max",    "clamp_min",   "clip",       "copysign",
    "div",         "divide",      "exp",          "exp2",        "expm1",      "fix",
    "float_power", "floor",       "floor_divide", "fmod",        "frac",       "hypot",
    "lerp",        "log",         "log10",        "log1p",       "log2",       "logaddexp",
    "logaddexp2",  "mul",         "multiply",     "nan_to_num",  "neg",        "negative",
    "positive",    "pow",         "reciprocal",   "remainder",   "round",      "rsqrt",
    "rsub",        "sgn",         "sign",         "sqrt",        "square",     "sub",
    "subtract",    "true_divide", "trunc",        "xlogy",
};

// Functions of each element, as above.
constexpr absl::string_view kFunctions[] = {
    "acos",    "acosh",   "arccos", "arccosh", "arcsin", "arcsinh", "arctan",
    "arctanh", "asin",    "asinh",  "atan",    "atanh",  "cos",     "cosh",
    "deg2rad", "digamma", "erf",    "erfc",    "erfinv", "lgamma",  "logit",
    "rad2deg", "sigmoid", "sin",    "sinc",    "sinh",   "tan",     "tanh",
};

// Comparisons and logic, as above. Those of whole tensors compare sizes first.
constexpr absl::string_view kComparisons[] = {
    "allclose",     "eq",          "equal",         "fmax",       "fmin",
    "ge",           "greater",     "greater_equal", "gt",         "is_nonzero",
    "is_same_size", "isclose",     "isfinite",      "isinf",      "isnan",
    "isneginf",     "isposinf",    "isreal",        "le",         "less",
    "less_equal",   "logical_and", "logical_not",   "logical_or", "logical_xor",
    "lt",           "maximum",     "minimum",       "ne",         "not_equal",
    "signbit",      "where",
};

// Complex numbers. Views check sizes and strides before they halve or double them.
constexpr absl::string_view kComplex[] = {
    "complex",      "conj",        "conj_physical",   "imag",         "polar", "real",
    "resolve_conj", "resolve_neg", "view_as_complex", "view_as_real",
};

// Sums and the like over dimensions, which are wrapped and checked first; without elements these
// are errors or the number that the reduction begins with.
constexpr absl::string_view kReductions[] = {
    "all",          "amax",
    "amin",         "aminmax",
    "any",          "argmax",
    "argmin",       "count_nonzero",
    "cummax",       "cummin",
    "cumprod",      "cumsum",
    "diff",         "linalg_vector_norm",
    "logcumsumexp", "logsumexp",
    "max",          "mean",
    "min",          "nanmean",
    "nansum",       "norm",
    "prod",         "std",
    "std_mean",     "sum",
    "sum_to_size",  "trace",
    "var",          "var_mean",
};

// Activations: elementwise, but for `softmax` and `log_softmax`, which go over one dimension that
// is checked (and make lists of sparse tensors, which count: piece_count.h), and `glu`, which wants
// an even size. `celu` refuses an alpha of 0.
constexpr absl::string_view kActivations[] = {
    "celu",
    "elu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "silu",
    "softmax",
    "softplus",
    "softshrink",
    "special_expit",
    "special_log_softmax",
    "special_softmax",
    "threshold",
};

// Losses. Those with classes check each target before it is an index (`nll_loss`), others are
// elementwise. Left out: `ctc_loss`, which takes lengths on trust, and margin losses of classes.
constexpr absl::string_view kLosses[] = {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy_loss",
    "dist",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "pairwise_distance",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
};

// Products of matrices and vectors. Sizes are checked against each other before BLAS or a kernel of
// libtorch's sees them, and strides that BLAS does not take are copied; sparse tensors make lists,
// which count. `einsum` checks its equation and each place in `path`. Left out: `chain_matmul` and
// `linalg_multi_dot`, which recurse.
constexpr absl::string_view kProducts[] = {
    "addbmm", "addmm", "addmv", "addr",  "baddbmm",      "bmm",           "cross",         "dot",
    "einsum", "ger",   "inner", "kron",  "linalg_cross", "linalg_matmul", "linalg_vecdot", "linear",
    "matmul", "mm",    "mv",    "outer", "tensordot",    "vdot",
};

// Factorizations that take a known number of steps, and what solves with them. Left out is what
// iterates until it converges (`linalg_svd`, `linalg_eigh`, `linalg_eig`, `linalg_lstsq`, and norms
// and ranks by them): libtorch's documentation says that LAPACK may end the process there for NaN
// and infinity.
constexpr absl::string_view kLinearAlgebra[] = {
    "cholesky",       "cholesky_inverse", "cholesky_solve",     "det",
    "inverse",        "linalg_cholesky",  "linalg_cholesky_ex", "linalg_det",
    "linalg_inv",     "linalg_inv_ex",    "linalg_lu_factor",   "linalg_qr",
    "linalg_slogdet", "linalg_solve",     "linalg_solve_ex",    "linalg_solve_triangular",
    "logdet",         "slogdet",
};

// Convolutions. libtorch refuses strides and dilations of 0 or less, paddings below 0, groups that
// do not divide the channels, and kernels that are larger than what is padded; number_check.h
// refuses what is too large for the arithmetic behind it, and groups count as tensors. Left out are
// the steps of these and their derivatives by name, which check less.
constexpr absl::string_view kConvolutions[] = {
    "conv1d",           "conv2d",           "conv3d",      "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution",
};

// Pooling and resampling. Windows are checked against what is padded; number_check.h has what these
// checks miss, integers and scales among it. Left out: the forms that return indices, what takes
// those back (`max_unpool*`), and `fractional_max_pool*`, whose samples are an argument.
constexpr absl::string_view kPools[] = {
    "adaptive_avg_pool1d",  "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d",  "avg_pool1d",          "avg_pool2d",          "avg_pool3d",
    "channel_shuffle",      "max_pool1d",          "max_pool2d",          "max_pool3d",
    "pixel_shuffle",        "pixel_unshuffle",     "upsample_bicubic2d",  "upsample_bilinear2d",
    "upsample_linear1d",    "upsample_nearest1d",  "upsample_nearest2d",  "upsample_nearest3d",
    "upsample_trilinear3d",
};

// Normalizations in the forms that check weights and statistics against the input, and dropout.
constexpr absl::string_view kNorms[] = {
    "alpha_dropout",   "batch_norm",
    "dropout",         "feature_alpha_dropout",
    "feature_dropout", "group_norm",
    "instance_norm",   "layer_norm",
    "rms_norm",        "scaled_dot_product_attention",
};

// What takes indices: each is compared with the size of its dimension, in the kernel, and an error
// if it is beyond. Left out: `embedding_bag`, `put`, `index_reduce`, `searchsorted` with its
// sorter, and `embedding_renorm`, and `repeat_interleave` with a tensor of repeats
// (operator_policy.cc).
constexpr absl::string_view kIndices[] = {
    "bincount",          "bucketize",      "embedding",     "gather",         "index",
    "index_add",         "index_copy",     "index_fill",    "index_put",      "index_select",
    "masked_fill",       "masked_scatter", "masked_select", "nonzero",        "one_hot",
    "repeat_interleave", "scatter",        "scatter_add",   "scatter_reduce", "take",
    "take_along_dim",    "tril",           "triu",
};

// Sorting. What these make of a dimension counts (`topk`). Left out: `kthvalue`, `median` and
// `mode`, which take each place of a dimension to have memory of its own, and `unique_*`.
constexpr absl::string_view kSorting[] = {
    "argsort",
    "msort",
    "sort",
    "topk",
};

// Views and copies of other shapes: sizes and dimensions are checked by the view itself, and what
// is cut into pieces counts. Left out: `as_strided`, `resize` and what takes strides.
constexpr absl::string_view kShapes[] = {
    "adjoint",
    "alias",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "block_diag",
    "broadcast_tensors",
    "broadcast_to",
    "cat",
    "chunk",
    "clone",
    "column_stack",
    "concat",
    "concatenate",
    "constant_pad_nd",
    "contiguous",
    "detach",
    "diag",
    "diag_embed",
    "diagflat",
    "diagonal",
    "diagonal_scatter",
    "dsplit",
    "dstack",
    "expand",
    "expand_as",
    "fill_diagonal_",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "hsplit",
    "hstack",
    "mH",
    "mT",
    "matrix_H",
    "meshgrid",
    "moveaxis",
    "movedim",
    "narrow",
    "numpy_T",
    "pad",
    "pad_sequence",
    "permute",
    "ravel",
    "reflection_pad1d",
    "reflection_pad2d",
    "repeat",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "reshape",
    "reshape_as",
    "roll",
    "rot90",
    "row_stack",
    "select",
    "select_scatter",
    "slice",
    "slice_scatter",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "swapaxes",
    "swapdims",
    "t",
    "tensor_split",
    "tile",
    "transpose",
    "unbind",
    "unflatten",
    "unfold",
    "unsqueeze",
    "view",
    "view_as",
    "vsplit",
    "vstack",
};

// What makes a tensor of a number or of others, with as many elements as the worker's limit allows
// (allocation_limit.h). Left out: `empty` and its kin, whose elements are what was in the process's
// memory before.
constexpr absl::string_view kCreation[] = {
    "arange",   "copy",     "eye",      "fill",      "full",  "full_like",  "item",
    "linspace", "new_full", "new_ones", "new_zeros", "ones",  "ones_like",  "scalar_tensor",
    "size",     "to",       "type_as",  "zero",      "zeros", "zeros_like",
};

// Random numbers of the worker's own generator. Parameters are checked; none of these goes on until
// it has drawn something of a kind (`poisson` and `binomial`, which do, are left out).
constexpr absl::string_view kRandom[] = {
    "bernoulli",    "exponential", "multinomial", "normal", "rand",     "rand_like", "randint",
    "randint_like", "randn",       "randn_like",  "random", "randperm", "uniform",
};

using Names = absl::Span<const absl::string_view>;

constexpr Names kGroups[] = {
    kElementwise, kFunctions, kComparisons,   kComplex,      kReductions, kActivations,
    kLosses,      kProducts,  kLinearAlgebra, kConvolutions, kPools,      kNorms,
    kIndices,     kSorting,   kShapes,        kCreation,     kRandom,
};

}  // namespace

absl::Span<const absl::Span<const absl::string_view>> ServedOperators() { return kGroups; }

bool IsListed(absl::string_view name) {
  static const auto* const kAll = [] {
    auto* const all = new absl::flat_hash_set<absl::string_view>;
    for (const Names& group : kGroups) all->insert(group.begin(), group.end());
    return all;
  }();
  if (!absl::ConsumePrefix(&name, "aten::")) return false;
  if (kAll->contains(name)) return true;
  // "add_" as "add", but for "__add__".
  return !absl::EndsWith(name, "__") && absl::ConsumeSuffix(&name, "_") && kAll->contains(name);
}

}  // namespace distgrad
