// Has the list of cheap operators, with how much each makes of its inputs.
#include "core/tensor/cheap_operators.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/strip.h"

namespace distgrad {
namespace {

constexpr size_t kShortBytes = 16 << 10;     // of all tensors that go in
constexpr int64_t kShortElements = 4 << 10;  // of a result

// Of these a result has no more elements than the tensors that go in have when they are broadcast
// together, whatever else is given, and the work is in proportion to that. Neither sizes nor a
// device can be given. Each in all its overloads, and in place too.
//
// No others belong here: neither factories and what takes sizes (new_ones, repeat, expand, pad),
// nor what makes as much as the values in a tensor say (bincount, one_hot, repeat_interleave), nor
// lists of tensors, in which one may stand any number of times.
bool IsElementwise(absl::string_view name) {
  static const auto* const kNames = new absl::flat_hash_set<absl::string_view>{
      // one tensor
      "abs", "ceil", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "cos", "detach",
      "erf", "exp", "expm1", "floor", "gelu", "isfinite", "isnan", "leaky_relu", "log", "log1p",
      "log2", "logical_not", "neg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign",
      "silu", "sin", "softplus", "sqrt", "square", "tan", "tanh", "trunc",
      // several, or one and numbers
      "add", "addcdiv", "addcmul", "atan2", "div", "eq", "ge", "gt", "le", "lerp", "logical_and",
      "logical_or", "lt", "maximum", "minimum", "mul", "ne", "pow", "rsub", "sub",
      // what makes less
      "all", "amax", "amin", "any", "argmax", "argmin", "log_softmax", "max", "mean", "min",
      "softmax", "sum",
      // views of no more than there is
      "flatten", "narrow", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose",
      "unsqueeze", "view"};
  return kNames->contains(name);
}

// How many elements they have when they are broadcast together, or more than are short.
int64_t BroadcastElements(absl::Span<const at::Tensor> tensors) {
  int64_t elements = 1;
  size_t dimensions = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) dimensions = std::max<size_t>(dimensions, tensor.dim());
  }
  for (size_t from_last = 1; from_last <= dimensions; ++from_last) {
    int64_t size = 1;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || static_cast<size_t>(tensor.dim()) < from_last) continue;
      size = std::max(size, tensor.size(-static_cast<int64_t>(from_last)));
    }
    if (size > kShortElements) return size;
    elements *= size;  // neither is above kShortElements
    if (elements > kShortElements) return elements;
  }
  return elements;
}

// How many elements a matrix product has, or more than are short where that is not as easy.
int64_t ProductElements(absl::string_view name, absl::Span<const at::Tensor> tensors) {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.dim() > 2) return kUnknown;
  }
  const bool is_mm = (name == "mm" || name == "matmul") && tensors.size() == 2;
  const bool is_linear = name == "linear" && (tensors.size() == 2 || tensors.size() == 3);
  if ((!is_mm && !is_linear) || tensors[0].dim() != 2 || tensors[1].dim() != 2) return kUnknown;
  const int64_t rows = tensors[0].size(0), columns = tensors[1].size(is_mm ? 1 : 0);
  // Where the size between them is 0 these may be any, and their product may overflow.
  if (rows > kShortElements || columns > kShortElements) return kUnknown;
  return rows * columns;
}

}  // namespace

bool CheapToRunInline(absl::string_view name, absl::Span<const at::Tensor> tensors) {
  if (!absl::ConsumePrefix(&name, "aten::") || tensors.empty()) return false;
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) return false;
    bytes += tensor.nbytes();
  }
  if (bytes > kShortBytes) return false;
  name = name.substr(0, name.find('.'));
  if (ProductElements(name, tensors) <= kShortElements) return true;
  absl::ConsumeSuffix(&name, "_");
  return IsElementwise(name) && BroadcastElements(tensors) <= kShortElements;
}

}  // namespace distgrad
