// Knows which operators divide, pool and scale by numbers that they are given.
#include "core/tensor/number_check.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/eq.h>
#include <c10/core/Layout.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

constexpr int64_t kLargest = int64_t{1} << 40;   // of any integer that counts something
constexpr int64_t kElements = int64_t{1} << 38;  // of a tensor, but for its sizes of 0
constexpr int64_t kWindow = int64_t{1} << 24;    // the places of a window
constexpr int64_t kStep = int64_t{1} << 31;      // between windows, or beside them
constexpr int64_t kConvolutionStride = 1 << 10;
constexpr int64_t kFactor = int64_t{1} << 20;
constexpr int64_t kBound = int64_t{1} << 61;  // the difference of two has 63 bits
constexpr double kLeastScale = 1e-6, kMostScale = 1e6;

// Without its namespace and what says that it writes.
absl::string_view BaseOf(absl::string_view name) {
  absl::ConsumePrefix(&name, "aten::");
  absl::ConsumeSuffix(&name, "_");
  return name;
}

// One or a list of them, as CallOperator() takes them; none of what is neither.
template <typename Number, typename Read>
std::vector<Number> AllOf(const c10::IValue& value, const Read& read) {
  std::vector<Number> numbers;
  const auto add = [&](const c10::IValue& item) {
    if (const std::optional<Number> number = read(item)) numbers.push_back(*number);
  };
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) add(item);
  } else {
    add(value);
  }
  return numbers;
}

std::vector<int64_t> IntsOf(const c10::IValue& value) {
  return AllOf<int64_t>(value, [](const c10::IValue& item) -> std::optional<int64_t> {
    if (item.isBool()) return int64_t{item.toBool()};
    return item.isInt() ? std::optional(item.toInt()) : std::nullopt;
  });
}

std::vector<double> FloatsOf(const c10::IValue& value) {
  return AllOf<double>(value, [](const c10::IValue& item) -> std::optional<double> {
    if (item.isDouble()) return item.toDouble();
    return item.isInt() ? std::optional(static_cast<double>(item.toInt())) : std::nullopt;
  });
}

// Whether an argument of that type counts or places something, which a scalar and a dtype do not.
bool IsOfInts(c10::TypePtr type) {
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (const auto list = type->cast<c10::ListType>()) type = list->getElementType();
  return type->kind() == c10::TypeKind::IntType || type->kind() == c10::TypeKind::SymIntType;
}

bool IsBeyond(int64_t number, int64_t most) { return number > most || number < -most; }

absl::Status NumberError(const c10::Argument& argument, int64_t number, int64_t most) {
  return absl::InvalidArgumentError(absl::StrCat("argument '", argument.name(), "' has the number ",
                                                 number, ", and may have ", most, " at most"));
}

// As far as each says something of itself, by the names of its schema.
absl::Status CheckRange(absl::string_view base, const c10::Argument& argument,
                        const c10::IValue& value) {
  if (!IsOfInts(argument.real_type())) return absl::OkStatus();
  const bool of_slice =
      absl::StartsWith(base, "slice") && (argument.name() == "start" || argument.name() == "end");
  const bool of_random = absl::StartsWith(base, "rand") && argument.name() != "size";
  if (of_slice || of_random) return absl::OkStatus();
  int64_t most = kLargest;
  const bool of_window = argument.name() == "kernel_size";
  if (of_window) {
    most = kWindow;
  } else if (argument.name() == "upscale_factor" || argument.name() == "downscale_factor") {
    most = kFactor;
  } else if (argument.name() == "stride" && absl::StartsWith(base, "conv")) {
    most = kConvolutionStride;
  } else if (argument.name() == "padding" || argument.name() == "dilation" ||
             (argument.name() == "stride" && !absl::StrContains(base, "strided"))) {
    most = kStep;
  }
  int64_t places = 1;
  for (const int64_t number : IntsOf(value)) {
    if (IsBeyond(number, most)) return NumberError(argument, number, most);
    if (!of_window || number == 0) continue;
    // Neither is more than 2^24, so this does not wrap around.
    places *= number < 0 ? -number : number;
    if (places > kWindow) return NumberError(argument, places, kWindow);
  }
  return absl::OkStatus();
}

absl::Status CheckElements(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return absl::OkStatus();
  int64_t elements = 1;
  for (const int64_t size : tensor.sizes()) {
    if (size == 0) continue;
    if (size > kElements / elements) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a tensor has no elements, and sizes of more than ", kElements, " together"));
    }
    elements *= size;
  }
  return absl::OkStatus();
}

// What may be a least number of an integer type, or -1, once it has been converted to the type in
// which an operator divides. A tensor that is not strided may have anything.
bool MayBe(const c10::IValue& value, int64_t of_32, int64_t of_64) {
  const auto either = [&](int64_t number) {
    return number == of_64 || static_cast<int32_t>(number) == static_cast<int32_t>(of_32);
  };
  if (value.isInt()) return either(value.toInt());
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.is_cpu() || tensor.numel() == 0) return false;
  const at::ScalarType type = tensor.scalar_type();
  const bool is_short = type == at::kShort || type == at::kChar;
  if (type != at::kLong && type != at::kInt && !is_short) return false;
  if (tensor.layout() != at::kStrided) return true;
  // One number takes the type of the other argument.
  if (tensor.dim() == 0) return either(tensor.item<int64_t>());
  // A comparison with a number that the type does not have would throw.
  if (is_short && of_32 != -1) return false;
  return tensor.eq(type == at::kLong ? of_64 : of_32).any().item<bool>();
}

absl::Status CheckDivision(absl::string_view base, absl::Span<const c10::IValue> args) {
  constexpr int64_t kLeast32 = std::numeric_limits<int32_t>::min();
  constexpr int64_t kLeast64 = std::numeric_limits<int64_t>::min();
  const bool divides = base == "div" || base == "divide" || base == "floor_divide" ||
                       base == "remainder" || base == "fmod";
  if ((!divides && base != "lcm") || args.size() < 2) return absl::OkStatus();
  const bool first = MayBe(args[0], kLeast32, kLeast64);
  if (divides ? first && MayBe(args[1], -1, -1) : first || MayBe(args[1], kLeast32, kLeast64)) {
    return absl::InvalidArgumentError(
        "it divides the least number of its type by -1, which is no number of that type");
  }
  return absl::OkStatus();
}

// The arguments of `arange` that are numbers: its begin, end and step.
absl::Status CheckBounds(absl::string_view base, const std::vector<c10::Argument>& arguments,
                         absl::Span<const c10::IValue> args) {
  constexpr auto kFloatBound = static_cast<double>(kBound);
  if (base != "arange" && base != "range") return absl::OkStatus();
  bool is_of_integers = false, has_fraction = false;
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::IValue& arg = args[i];
    const bool is_dtype = i < arguments.size() && arguments[i].name() == "dtype";
    if ((arg.isTensor() && arg.toTensor().defined() &&
         at::isIntegralType(arg.toTensor().scalar_type(), /*includeBool=*/true)) ||
        (is_dtype && arg.isInt() &&
         at::isIntegralType(static_cast<at::ScalarType>(arg.toInt()), /*includeBool=*/true))) {
      is_of_integers = true;
    }
    has_fraction |= arg.isDouble() && std::abs(arg.toDouble()) < 1 && arg.toDouble() != 0;
    if ((arg.isDouble() && !(std::abs(arg.toDouble()) <= kFloatBound)) ||
        (arg.isInt() && IsBeyond(arg.toInt(), kBound))) {
      return absl::InvalidArgumentError(
          absl::StrCat("its numbers may be from ", -kBound, " to ", kBound));
    }
  }
  if (!is_of_integers || !has_fraction) return absl::OkStatus();
  return absl::InvalidArgumentError("a step between integers has to be one of them, and not 0");
}

absl::Status CheckAverage(absl::string_view base, absl::Span<const c10::IValue> args) {
  if (!absl::StartsWith(base, "avg_pool") || args.empty() || !args[0].isTensor()) {
    return absl::OkStatus();
  }
  const at::Tensor& input = args[0].toTensor();
  if (!input.defined() || input.is_floating_point() || input.is_complex()) return absl::OkStatus();
  return absl::InvalidArgumentError("averages of integers are not pooled for a peer");
}

// One for each of the last dimensions; the last one that there is stands for those that are
// missing, as libtorch has it.
int64_t Of(const std::vector<int64_t>& numbers, size_t i, int64_t none) {
  if (numbers.empty()) return none;
  return i < numbers.size() ? numbers[i] : numbers.back();
}

absl::Status CheckMaximum(absl::string_view base, absl::Span<const c10::IValue> args) {
  constexpr size_t kKernel = 1, kPadding = 3, kDilation = 4;
  constexpr int64_t kExtent = int64_t{1} << 30;
  const size_t at = base.find("max_pool");
  if (at == absl::string_view::npos || absl::StartsWith(base, "adaptive") ||
      args.size() <= kDilation || !args[0].isTensor() || !args[0].toTensor().defined()) {
    return absl::OkStatus();
  }
  constexpr size_t kName = absl::string_view("max_pool").size();
  const absl::string_view rest = base.substr(at + kName);
  const size_t dimensions = rest.empty() ? 0 : static_cast<size_t>(rest[0] - '0');
  const at::Tensor& input = args[0].toTensor();
  const auto input_dimensions = static_cast<size_t>(input.dim());
  if (dimensions > 3 || input_dimensions < dimensions) return absl::OkStatus();  // libtorch's error
  const std::vector<int64_t> kernel = IntsOf(args[kKernel]), padding = IntsOf(args[kPadding]),
                             dilation = IntsOf(args[kDilation]);
  for (size_t i = 0; i < dimensions; ++i) {
    const int64_t size = input.size(static_cast<int64_t>(input_dimensions - dimensions + i));
    if (Of(padding, i, 0) > 0 && Of(dilation, i, 1) > size) {
      return absl::InvalidArgumentError(
          absl::StrCat("a dilation of ", Of(dilation, i, 1), " is more than the ", size,
                       " places of a dimension that is padded: windows may have none of these"));
    }
    // CheckRange() has taken these, so this does not wrap around; libtorch's 32 bits may.
    const int64_t extent = Of(dilation, i, 1) * Of(kernel, i, 1);
    if (extent > kExtent) {
      return absl::InvalidArgumentError(absl::StrCat("a window goes over ", extent,
                                                     " places, and may over ", kExtent,
                                                     " at most, its dilation included"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPadding(absl::string_view base, absl::Span<const c10::IValue> args) {
  constexpr size_t kPad = 1, kMode = 2, kOfThree = 6;
  if (base != "pad" || args.size() <= kMode || !args[kMode].isString() ||
      args[kMode].toStringRef() != "reflect" || IntsOf(args[kPad]).size() < kOfThree) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError("three dimensions are not reflected for a peer");
}

absl::Status CheckScale(absl::string_view base, const c10::Argument& argument,
                        const c10::IValue& value) {
  if (!absl::StartsWith(base, "upsample_") || !absl::StartsWith(argument.name(), "scale")) {
    return absl::OkStatus();
  }
  for (const double scale : FloatsOf(value)) {
    if (scale >= kLeastScale && scale <= kMostScale) continue;
    return absl::InvalidArgumentError(absl::StrCat("argument '", argument.name(), "' is ", scale,
                                                   ", and may be from ", kLeastScale, " to ",
                                                   kMostScale));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckNumbers(const c10::OperatorHandle& op, absl::Span<const c10::IValue> args) {
  const absl::string_view base = BaseOf(op.operator_name().name);
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (size_t i = 0; i < args.size() && i < arguments.size(); ++i) {
    DG_RETURN_IF_ERROR(CheckRange(base, arguments[i], args[i]));
    DG_RETURN_IF_ERROR(CheckScale(base, arguments[i], args[i]));
    if (arguments[i].name() == "pin_memory" && args[i].isBool() && args[i].toBool()) {
      return absl::InvalidArgumentError(
          "argument 'pin_memory' is true: memory is not pinned for other workers");
    }
    if (arguments[i].name() == "layout" && args[i].isInt() &&
        args[i].toInt() == static_cast<int64_t>(c10::Layout::Mkldnn)) {
      return absl::InvalidArgumentError(
          "argument 'layout' is that of oneDNN: tensors of it are not made for other workers");
    }
    if (args[i].isTensor()) {
      DG_RETURN_IF_ERROR(CheckElements(args[i].toTensor()));
    } else if (args[i].isTensorList()) {
      for (const at::Tensor& tensor : args[i].toTensorVector()) {
        DG_RETURN_IF_ERROR(CheckElements(tensor));
      }
    }
  }
  DG_RETURN_IF_ERROR(CheckDivision(base, args));
  DG_RETURN_IF_ERROR(CheckBounds(base, arguments, args));
  DG_RETURN_IF_ERROR(CheckAverage(base, args));
  DG_RETURN_IF_ERROR(CheckPadding(base, args));
  return CheckMaximum(base, args);
}

absl::Status CheckSizes(absl::Span<const c10::IValue> results) {
  const auto check = [](const at::Tensor& tensor) {
    if (!tensor.defined()) return absl::OkStatus();
    for (const int64_t size : tensor.sizes()) {
      if (size >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("its result would have the size ", size));
    }
    return absl::OkStatus();
  };
  for (const c10::IValue& result : results) {
    if (result.isTensor()) {
      DG_RETURN_IF_ERROR(check(result.toTensor()));
    } else if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) DG_RETURN_IF_ERROR(check(tensor));
    }
  }
  return absl::OkStatus();
}

}  // namespace distgrad
