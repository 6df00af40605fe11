// Knows the operators that make lists, and computes from their arguments how long these are.
#include "core/tensor/piece_count.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace distgrad {
namespace {

// One name for all that cut in the same way.
enum class Cut {
  kUnbind,    // one for each of a size
  kSplit,     // of a size, or of several
  kChunk,     // so many, or fewer
  kAtPlaces,  // so many, or one more than the places to cut at
  kAtOnce,    // so many copies of one, to make a grid of
  kGroups,    // so many groups of channels, of which each is a convolution
  kSteps,     // one for each step, and for each layer, of a recurrent network
  kNumbers,   // one for each number that a point has, of which there is a histogram
  kTimes,     // one for each time that it is done again, of which autograd keeps all
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
  if (name == "combinations") return Cut::kAtOnce;
  if (absl::StrContains(name, "conv")) return Cut::kGroups;
  if (name == "rnn_tanh" || name == "rnn_relu") return Cut::kSteps;
  if (name == "histogramdd") return Cut::kNumbers;
  if (name == "diff") return Cut::kTimes;
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

bool IsListOfInts(c10::TypePtr type) {
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  const auto list = type->cast<c10::ListType>();
  return list != nullptr && (list->getElementType()->kind() == c10::TypeKind::IntType ||
                             list->getElementType()->kind() == c10::TypeKind::SymIntType);
}

// 0 for a convolution that has none.
int64_t GroupsOf(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const std::optional<int> place = op.schema().argumentIndexWithName("groups");
  if (!place.has_value() || static_cast<size_t>(*place) >= args.size()) return 0;
  return IntOf(args[*place]).value_or(0);
}

// Of input and state, or of data, the sizes of its batches and state.
int64_t StepsOf(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const auto size_of = [&](size_t argument, int64_t dimension) {
    if (argument >= args.size() || !args[argument].isTensor()) return int64_t{0};
    const at::Tensor& tensor = args[argument].toTensor();
    return tensor.defined() && dimension < tensor.dim() ? tensor.size(dimension) : 0;
  };
  if (absl::StartsWith(op.operator_name().overload_name, "data"))
    return std::max(size_of(1, 0), size_of(2, 0));
  constexpr size_t kBatchFirst = 8;
  const bool batch_first = args.size() > kBatchFirst && IntOf(args[kBatchFirst]).value_or(0) != 0;
  return std::max(size_of(0, batch_first ? 1 : 0), size_of(1, 0));
}

// A dimension of a tensor on whose elements the processor works.
struct Dimension {
  int64_t size = 0;
  int64_t others = 0;  // elements for each of its places; 0 if it has none
};

// The first argument's, which argument `place` names; `usual` if that is left out. None if there is
// no such dimension, or no number is given where there is no usual one.
std::optional<Dimension> DimensionOf(absl::Span<const c10::IValue> args, size_t place,
                                     std::optional<int64_t> usual) {
  if (!args[0].isTensor()) return std::nullopt;
  const at::Tensor& tensor = args[0].toTensor();
  if (!tensor.defined() || tensor.is_cuda()) return std::nullopt;
  std::optional<int64_t> named = place < args.size() ? IntOf(args[place]) : std::nullopt;
  if (!named.has_value()) named = usual;
  if (!named.has_value()) return std::nullopt;
  const int64_t dimension = *named < 0 ? *named + tensor.dim() : *named;
  if (dimension < 0 || dimension >= tensor.dim()) return std::nullopt;
  const int64_t size = tensor.size(dimension);
  return Dimension{size, size == 0 ? 0 : tensor.numel() / size};
}

// No more than fits.
int64_t Times(int64_t count, int64_t bytes) {
  int64_t all = 0;
  return __builtin_mul_overflow(count, bytes, &all) ? std::numeric_limits<int64_t>::max() : all;
}

// Of a list of the elements of a dimension, and of their places, on each thread that works at it.
int64_t ElementListBytes(const std::optional<Dimension>& dimension) {
  if (!dimension.has_value()) return 0;
  const int64_t lists = std::min<int64_t>(dimension->others, at::get_num_threads());
  constexpr int64_t kBytesOfEach = 2 * sizeof(int64_t);
  return Times(dimension->size, lists * kBytesOfEach);
}

// Of a tensor for each place of a dimension, with what libtorch needs to put them together again.
int64_t PlaceTensorBytes(const std::optional<Dimension>& dimension) {
  constexpr int64_t kBytesOfEach = 256;
  return dimension.has_value() ? Times(dimension->size, kBytesOfEach) : 0;
}

// Calls `visit` with each tensor that is defined, in a list or not, and its argument's place.
template <typename Visit>
void ForEachTensor(absl::Span<const c10::IValue> args, Visit visit) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isTensor()) {
      if (args[i].toTensor().defined()) visit(args[i].toTensor(), i);
    } else if (args[i].isList() && !args[i].isIntList() && !args[i].isDoubleList()) {
      for (const c10::IValue& item : args[i].toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor(), i);
      }
    }
  }
}

// Of a Fourier transform of that length, beside elements: a length with a large prime factor is
// computed by some longer ones.
int64_t TransformBytes(int64_t length) {
  constexpr int64_t kBytesOfEach = 128;
  int64_t rest = std::max<int64_t>(length, 1);
  for (const int64_t prime : {2, 3, 5, 7, 11, 13}) {
    while (rest % prime == 0) rest /= prime;
  }
  return rest == 1 ? 0 : Times(length, kBytesOfEach);
}

// The numbers of a list or the only one, as CallOperator() takes them; none for what is neither.
std::vector<int64_t> NumbersOf(absl::Span<const c10::IValue> args, size_t place) {
  std::vector<int64_t> numbers;
  if (place >= args.size()) return numbers;
  const auto add = [&numbers](const c10::IValue& value) {
    if (const std::optional<int64_t> number = IntOf(value)) numbers.push_back(*number);
  };
  if (args[place].isList()) {
    for (const c10::IValue& item : args[place].toListRef()) add(item);
  } else {
    add(args[place]);
  }
  return numbers;
}

// The dimensions that `fft_*` transforms: those of argument 2; or else the last one, or two, or all
// or the last ones of as many lengths as are given. In their order.
std::vector<int64_t> TransformedDimensions(absl::string_view name,
                                           absl::Span<const c10::IValue> args, int64_t dimensions) {
  std::vector<int64_t> transformed = NumbersOf(args, 2);
  if (!transformed.empty()) return transformed;
  size_t last = 1;
  if (absl::EndsWith(name, "2")) {
    last = 2;
  } else if (absl::EndsWith(name, "n")) {
    const size_t given = NumbersOf(args, 1).size();
    last = given > 0 ? given : static_cast<size_t>(dimensions);
  }
  for (auto i = static_cast<int64_t>(last); i > 0; --i) transformed.push_back(-i);
  return transformed;
}

// Of the longest of the transforms that are made of the dimensions of a tensor, each of a length
// that is given or of the dimension's size. A result without its redundant half is, in the last of
// these dimensions, twice as long as what it is made of.
int64_t TransformsBytes(absl::string_view name, absl::Span<const c10::IValue> args) {
  if (!args[0].isTensor() || !args[0].toTensor().defined()) return 0;
  const at::Tensor& tensor = args[0].toTensor();
  if (tensor.is_cuda() || absl::EndsWith(name, "shift")) return 0;  // that one moves elements
  const bool doubles = absl::StartsWith(name, "fft_irfft") || absl::StartsWith(name, "fft_hfft");
  const std::vector<int64_t> lengths = NumbersOf(args, 1);
  const std::vector<int64_t> transformed = TransformedDimensions(name, args, tensor.dim());
  int64_t most = 0;
  for (size_t i = 0; i < transformed.size(); ++i) {
    const int64_t named = transformed[i];
    const int64_t dimension = named < 0 ? named + tensor.dim() : named;
    if (dimension < 0 || dimension >= tensor.dim()) continue;
    int64_t length = tensor.size(dimension);
    if (doubles && i + 1 == transformed.size()) length = Times(2, length - 1);
    // -1 stands for the size.
    if (i < lengths.size() && lengths[i] > 0) length = lengths[i];
    most = std::max(most, TransformBytes(length));
  }
  return most;
}

// Of the transforms of all frames of a signal, which have one length.
int64_t FramesBytes(absl::Span<const c10::IValue> args) {
  if (!args[0].isTensor() || !args[0].toTensor().defined() || args[0].toTensor().is_cuda()) {
    return 0;
  }
  return args.size() < 2 ? 0 : TransformBytes(IntOf(args[1]).value_or(0));
}

// Of the text that an error of `meshgrid` makes of a tensor with more dimensions than it takes.
int64_t TensorTextBytes(absl::Span<const c10::IValue> args) {
  constexpr int64_t kBytesOfEach = 128;
  int64_t most = 0;
  ForEachTensor(args, [&most](const at::Tensor& tensor, size_t) {
    if (tensor.dim() > 1) most = std::max(most, Times(tensor.numel(), kBytesOfEach));
  });
  return most;
}

// Whether it makes a list for each line of a sparse tensor in one dimension.
bool ListsLines(absl::string_view name) {
  absl::ConsumePrefix(&name, "aten::");
  name = name.substr(0, name.find('.'));
  return absl::EndsWith(name, "softmax") || name == "cross_entropy_loss";
}

// Of lists of all places of a dimension of a sparse tensor, which may be any number: a product of
// two (`mm`, and what multiplies by it) makes three of the columns, `to_sparse_bsr` one. And of all
// places but those of one dimension, which may be the shortest, where each has a list: of 24 bytes,
// of which there are three times as many when there come more.
int64_t SparseListBytes(absl::string_view name, absl::Span<const c10::IValue> args) {
  constexpr int64_t kBytesOfEach = 32;
  constexpr int64_t kBytesOfList = 72;
  const bool lists_lines = ListsLines(name);
  int64_t most = 0;
  ForEachTensor(args, [&](const at::Tensor& tensor, size_t) {
    if (tensor.layout() != at::kSparse || tensor.is_cuda()) return;
    for (const int64_t size : tensor.sizes()) most = std::max(most, Times(size, kBytesOfEach));
    if (!lists_lines) return;
    std::vector<int64_t> sizes = tensor.sizes().slice(0, tensor.sparse_dim()).vec();
    std::sort(sizes.begin(), sizes.end());
    int64_t lines = 1;
    for (size_t i = 1; i < sizes.size(); ++i) lines = Times(lines, sizes[i]);
    most = std::max(most, Times(lines, kBytesOfList));
  });
  return most;
}

// What operators of that name make.
int64_t NamedListBytes(absl::string_view name, absl::Span<const c10::IValue> args) {
  if (!absl::ConsumePrefix(&name, "aten::") || args.empty()) return 0;
  name = name.substr(0, name.find('.'));
  if (name == "topk") return ElementListBytes(DimensionOf(args, 2, /*usual=*/-1));
  // Without replacement it takes the first ones of random numbers.
  if (name == "multinomial" && (args.size() < 3 || IntOf(args[2]).value_or(0) == 0)) {
    return ElementListBytes(DimensionOf(args, args.size(), /*usual=*/-1));
  }
  if (name == "mode") return ElementListBytes(DimensionOf(args, 1, /*usual=*/-1));
  if (name == "median" || name == "nanmedian") {
    return ElementListBytes(DimensionOf(args, 1, /*usual=*/std::nullopt));
  }
  if (absl::StartsWith(name, "fft_")) return TransformsBytes(name, args);
  if (name == "stft" || name == "istft") return FramesBytes(args);
  if (name == "unique_dim" || name == "unique_dim_consecutive") {
    return PlaceTensorBytes(DimensionOf(args, 1, /*usual=*/std::nullopt));
  }
  if (name == "unique_consecutive") {
    return PlaceTensorBytes(DimensionOf(args, 3, /*usual=*/std::nullopt));
  }
  // For each of n tensors a view of n dimensions: its sizes and strides, and what autograd keeps of
  // them to compute gradients and to make the view anew.
  constexpr int64_t kBytesOfView = 96;
  // What a product of neighbours costs, and where it is best divided.
  constexpr int64_t kBytesOfProduct = 2 * sizeof(int64_t);
  const int64_t length = args[0].isList() ? static_cast<int64_t>(args[0].toListRef().size()) : 0;
  const auto square = [](int64_t count, int64_t bytes) {
    return count <= 0 ? 0 : Times(count, Times(count, bytes));
  };
  if (name == "combinations") {
    return square(args.size() > 1 ? IntOf(args[1]).value_or(0) : 0, kBytesOfView);
  }
  if (name == "meshgrid") return std::max(square(length, kBytesOfView), TensorTextBytes(args));
  if (name == "cartesian_prod") return square(length, kBytesOfView);
  if (name == "linalg_multi_dot" || name == "chain_matmul") return square(length, kBytesOfProduct);
  return 0;
}

// Whether it gives a tensor other sizes and strides in place, and writes to no element. `resize_`
// and `resize_as_`, which libtorch marks as such too, may take more memory, and take a view in
// which one element stands for many to have memory for each. piece_count_test.cc looks for others.
bool OnlyTurnsView(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view) &&
         !absl::StartsWith(op.operator_name().name, "aten::resize_");
}

// Whether one element stands for many, in any dimension or in that one.
bool Repeats(const at::Tensor& tensor, std::optional<int64_t> dimension = std::nullopt) {
  if (tensor.layout() != at::kStrided) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (dimension.value_or(i) == i && tensor.size(i) > 1 && tensor.stride(i) == 0) return true;
  }
  return false;
}

}  // namespace

bool CutsIntoPieces(absl::string_view name) { return CutOf(name).has_value(); }

int64_t CountPieces(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const std::optional<Cut> cut = CutOf(op.operator_name().name);
  if (cut == Cut::kGroups) return GroupsOf(op, args);
  if (cut == Cut::kSteps) return StepsOf(op, args);
  if (cut == Cut::kAtOnce || cut == Cut::kTimes) {
    return args.size() < 2 ? 0 : IntOf(args[1]).value_or(0);
  }
  if (!cut.has_value() || args.empty() || !args[0].isTensor()) return 0;
  const at::Tensor& tensor = args[0].toTensor();
  if (!tensor.defined()) return 0;
  if (*cut == Cut::kUnbind) return SizeOf(tensor, args, 1);
  if (*cut == Cut::kNumbers) return tensor.dim() == 0 ? 0 : tensor.size(-1);
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

int64_t CountListBytes(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const std::string& name = op.operator_name().name;
  return std::max(SparseListBytes(name, args), NamedListBytes(name, args));
}

ShownTensors CountShown(absl::Span<const c10::IValue> args) {
  ShownTensors shown;
  ForEachTensor(args, [&shown](const at::Tensor& tensor, size_t place) {
    if (tensor.layout() != at::kStrided) return;
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.numel()), tensor.element_size(),
                               &bytes) ||
        __builtin_add_overflow(shown.bytes, bytes, &shown.bytes)) {
      shown.bytes = std::numeric_limits<uint64_t>::max();
    }
    const bool is_known = !shown.repeating.empty() && shown.repeating.back() == place;
    if (!is_known && Repeats(tensor)) shown.repeating.push_back(place);
  });
  return shown;
}

absl::Status CheckListLengths(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  constexpr size_t kDimensions = 64;  // of a tensor in a message, at most
  // Of what is to be padded, both ends of each dimension.
  constexpr size_t kMost = 2 * kDimensions;
  if (CutsIntoPieces(op.operator_name().name)) return absl::OkStatus();
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (size_t i = 0; i < args.size() && i < arguments.size(); ++i) {
    if (!args[i].isList() || args[i].toListRef().size() <= kMost) continue;
    const c10::Argument& argument = arguments[i];
    if (!IsListOfInts(argument.real_type())) continue;
    // One for each product, of as many tensors as have come.
    if (argument.name() == "path") continue;
    return absl::InvalidArgumentError(
        absl::StrCat("argument '", argument.name(), "' has ", args[i].toListRef().size(),
                     " numbers; there may be ", kMost, ", for a tensor has ", kDimensions,
                     " dimensions at most"));
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  constexpr const char* kNames[] = {"queries", "keys", "values"};
  constexpr size_t kShare = 7;
  if (op.operator_name().name != "aten::scaled_dot_product_attention") return absl::OkStatus();
  const bool shared = args.size() > kShare && IntOf(args[kShare]).value_or(0) != 0;
  for (size_t i = 0; i < 3 && i < args.size(); ++i) {
    if (!args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const at::Tensor& heads = args[i].toTensor();
    // Of three dimensions the first one is mostly a batch's, and is no head's then.
    if (heads.dim() < (shared ? 3 : 4) || heads.size(-3) > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the ", kNames[i], " of an attention need a head at least, and have none"));
  }
  const auto count = [&](size_t i) -> std::optional<int64_t> {
    if (i >= args.size() || !args[i].isTensor()) return std::nullopt;
    const at::Tensor& tensor = args[i].toTensor();
    return tensor.defined() && tensor.dim() >= 2 ? std::optional(tensor.size(-2)) : std::nullopt;
  };
  const std::optional<int64_t> keys = count(1), values = count(2);
  if (!keys.has_value() || !values.has_value() || keys == values) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("an attention needs as many values as keys, and has ", *values, " and ", *keys));
}

absl::Status CheckViews(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args,
                        const ShownTensors& shown) {
  if (shown.repeating.empty()) return absl::OkStatus();
  for (const size_t place : shown.repeating) {
    if (place >= op.schema().arguments().size()) break;
    const c10::Argument& argument = op.schema().arguments()[place];
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite()) continue;
    if (OnlyTurnsView(op)) break;
    return absl::InvalidArgumentError(absl::StrCat(
        "argument '", argument.name(), "' is written to, and one of its elements stands for many"));
  }
  absl::string_view name = op.operator_name().name;
  absl::ConsumePrefix(&name, "aten::");
  absl::ConsumePrefix(&name, "nan");
  // The overload without a dimension asks for one of all elements, and copies them.
  if (name != "median" || !absl::StartsWith(op.operator_name().overload_name, "dim")) {
    return absl::OkStatus();
  }
  if (args.size() < 2 || !args[0].isTensor() || !args[0].toTensor().defined()) {
    return absl::OkStatus();
  }
  const at::Tensor& tensor = args[0].toTensor();
  const int64_t named = IntOf(args[1]).value_or(0);
  if (!Repeats(tensor, named < 0 ? named + tensor.dim() : named)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "one element stands for all of the dimension, of which each has to be there");
}

}  // namespace distgrad
