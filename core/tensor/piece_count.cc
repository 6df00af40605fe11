// Has the operators that cut a tensor, and computes the number of pieces from arguments.
#include "core/tensor/piece_count.h"

#include <optional>

#include "absl/strings/strip.h"

namespace distgrad {
namespace {

// One name for all that cut in the same way.
enum class Cut {
  kUnbind,    // one for each of a size
  kSplit,     // of a size, or of several
  kChunk,     // so many, or fewer
  kAtPlaces,  // so many, or one more than the places to cut at
};

std::optional<Cut> CutOf(absl::string_view name) {
  if (!absl::ConsumePrefix(&name, "aten::")) return std::nullopt;
  name = name.substr(0, name.find('.'));
  absl::ConsumePrefix(&name, "unsafe_");
  absl::ConsumeSuffix(&name, "_copy");
  if (name == "unbind") return Cut::kUnbind;
  if (name == "split" || name == "split_with_sizes") return Cut::kSplit;
  if (name == "chunk") return Cut::kChunk;
  if (name == "tensor_split" || name == "hsplit" || name == "vsplit" || name == "dsplit") {
    return Cut::kAtPlaces;
  }
  return std::nullopt;
}

// CallOperator() takes a bool for an int.
std::optional<int64_t> IntOf(const c10::IValue& value) {
  if (value.isBool()) return int64_t{value.toBool()};
  return value.isInt() ? std::optional(value.toInt()) : std::nullopt;
}

// Of the dimension that argument `place` names, the first if there is none; 0 if the tensor has no
// such dimension.
int64_t SizeOf(const at::Tensor& tensor, absl::Span<const c10::IValue> args, size_t place) {
  const std::optional<int64_t> named = place < args.size() ? IntOf(args[place]) : 0;
  if (!named.has_value()) return 0;
  const int64_t dimension = *named < 0 ? *named + tensor.dim() : *named;
  return dimension < 0 || dimension >= tensor.dim() ? 0 : tensor.size(dimension);
}

// The pieces of a size of which each has `piece`, the last one perhaps less.
int64_t PiecesOf(int64_t size, int64_t piece) { return (size - 1) / piece + 1; }

}  // namespace

bool CutsIntoPieces(absl::string_view name) { return CutOf(name).has_value(); }

int64_t CountPieces(absl::string_view name, absl::Span<const c10::IValue> args) {
  const std::optional<Cut> cut = CutOf(name);
  if (!cut.has_value() || args.empty() || !args[0].isTensor()) return 0;
  const at::Tensor& tensor = args[0].toTensor();
  if (!tensor.defined()) return 0;
  if (*cut == Cut::kUnbind) return SizeOf(tensor, args, 1);
  if (args.size() < 2) return 0;
  const c10::IValue& how = args[1];
  if (how.isList()) {
    const auto length = static_cast<int64_t>(how.toListRef().size());
    return *cut == Cut::kAtPlaces ? length + 1 : length;
  }
  if (how.isTensor() && *cut == Cut::kAtPlaces) {
    const at::Tensor& places = how.toTensor();
    if (!places.defined() || places.scalar_type() != at::kLong || !places.is_cpu()) return 0;
    return places.dim() == 0 ? places.item<int64_t>() : places.numel() + 1;
  }
  const std::optional<int64_t> number = IntOf(how);
  if (!number.has_value() || *number <= 0) return 0;
  if (*cut == Cut::kAtPlaces) return *number;
  const int64_t size = SizeOf(tensor, args, 2);
  // Of nothing there are as many pieces as one likes, or one.
  if (size == 0) return *cut == Cut::kChunk ? *number : 1;
  return PiecesOf(size, *cut == Cut::kChunk ? PiecesOf(size, *number) : *number);
}

}  // namespace distgrad
