// Fits arguments to the schema of an operator, and calls it.
#include "core/tensor/operator.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/tensor/exception.h"
#include "core/tensor/find_operator.h"
#include "core/tensor/operator_policy.h"

namespace distgrad {
namespace {

using c10::TypeKind;

// ---------------------------------------------------------------- arguments

bool Coerce(const c10::TypePtr& type, std::optional<int32_t> length, c10::IValue& value);

// libtorch makes enums of these ints without a look at them.
bool IsEnum(const c10::IValue& value, int64_t count) {
  return value.isInt() && value.toInt() >= 0 && value.toInt() < count;
}

bool CoerceList(const c10::TypePtr& element, std::optional<int32_t> length, c10::IValue& value) {
  // The boxed form of a SymInt is an int.
  const c10::TypePtr stored =
      element->kind() == TypeKind::SymIntType ? c10::TypePtr(c10::IntType::get()) : element;
  if (!value.isList()) {
    const bool repeats = stored->kind() == TypeKind::IntType ||
                         stored->kind() == TypeKind::FloatType ||
                         stored->kind() == TypeKind::BoolType;
    if (!repeats || !length.has_value() || !Coerce(stored, std::nullopt, value)) return false;
    c10::impl::GenericList list(stored);
    for (int32_t i = 0; i < *length; ++i) list.push_back(value);
    value = list;
    return true;
  }
  if (stored->kind() == TypeKind::IntType && value.isIntList()) return true;
  if (stored->kind() == TypeKind::TensorType && value.isTensorList()) return true;
  c10::impl::GenericList list(stored);
  const c10::ArrayRef<c10::IValue> given = value.toListRef();
  list.reserve(given.size());
  for (c10::IValue item : given) {
    if (stored->kind() == TypeKind::TensorType && !item.isTensor()) return false;
    if (!Coerce(stored, std::nullopt, item)) return false;
    list.push_back(std::move(item));
  }
  value = list;
  return true;
}

// Makes `value` one of `type`, if it can stand for one.
bool Coerce(const c10::TypePtr& type, std::optional<int32_t> length, c10::IValue& value) {
  switch (type->kind()) {
    case TypeKind::TensorType:
      if (value.isTensor()) return true;
      if (!value.isScalar()) return false;
      value = at::native::wrapped_scalar_tensor(value.toScalar());
      return true;
    case TypeKind::OptionalType: {
      const c10::TypePtr& element = type->castRaw<c10::OptionalType>()->getElementType();
      if (value.isTensor() && !value.toTensor().defined() &&
          element->kind() == TypeKind::TensorType) {
        value = c10::IValue();
      }
      return value.isNone() || Coerce(element, length, value);
    }
    case TypeKind::ListType:
      return CoerceList(type->castRaw<c10::ListType>()->getElementType(), length, value);
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      if (value.isBool()) value = int64_t{value.toBool()};
      return value.isInt();
    case TypeKind::FloatType:
      if (value.isBool()) value = value.toBool() ? 1.0 : 0.0;
      if (value.isInt()) value = static_cast<double>(value.toInt());
      return value.isDouble();
    case TypeKind::NumberType:
      return value.isScalar();
    case TypeKind::BoolType:
      return value.isBool();
    case TypeKind::StringType:
      return value.isString();
    case TypeKind::DeviceObjType:
      if (value.isString()) value = at::Device(value.toStringRef());
      return value.isDevice();
    case TypeKind::ScalarTypeType:
      return IsEnum(value, static_cast<int64_t>(at::ScalarType::Undefined));
    case TypeKind::LayoutType:
      return IsEnum(value, static_cast<int64_t>(at::Layout::NumOptions));
    case TypeKind::MemoryFormatType:
      return IsEnum(value, static_cast<int64_t>(at::MemoryFormat::NumOptions));
    case TypeKind::AnyType:
      return true;
    default:
      return value.type()->isSubtypeOf(*type);
  }
}

// Whether it is the name of a dimension, or a list of such. Schemas say str of these too, so the
// argument's own name has to tell; operator_test.cc looks for others.
bool NamesDimensions(const c10::Argument& argument) {
  if (!absl::StartsWith(argument.type()->str(), "str")) return false;
  for (const absl::string_view name : {"dim", "dim0", "dim1", "dim2", "dims", "end_dim", "names",
                                       "order", "out_dim", "outdim", "start_dim"}) {
    if (argument.name() == name) return true;
  }
  return false;
}

// Makes `args` what `schema` asks for.
absl::Status Fit(const c10::FunctionSchema& schema, std::vector<c10::IValue>& args) {
  const std::vector<c10::Argument>& arguments = schema.arguments();
  if (args.size() > arguments.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("takes ", arguments.size(), " arguments at most, not ", args.size()));
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::Argument& argument = arguments[i];
    // libtorch would answer to a plain string that this is a bug of its own; and it would keep each
    // name for ever, also one that a peer has sent.
    if (!args[i].isNone() && NamesDimensions(argument)) {
      return absl::InvalidArgumentError(
          absl::StrCat("argument ", i + 1, " '", argument.name(),
                       "' names dimensions, which distgrad does not pass; use the overload that "
                       "takes their numbers"));
    }
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if ((!written || args[i].isTensor() || args[i].isTensorList() || args[i].isNone()) &&
        Coerce(argument.real_type(), argument.N(), args[i])) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "argument ", i + 1, " '", argument.name(), "' must be ", argument.real_type()->str(),
        ", not ", args[i].isInt() ? absl::StrCat("int ", args[i].toInt()) : args[i].type()->str()));
  }
  args.reserve(arguments.size());
  for (size_t i = args.size(); i < arguments.size(); ++i) {
    const std::optional<c10::IValue>& value = arguments[i].default_value();
    if (!value.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("argument ", i + 1, " '", arguments[i].name(),
                                                     "' (", arguments[i].real_type()->str(),
                                                     ") is missing and has no default"));
    }
    args.push_back(*value);
  }
  return absl::OkStatus();
}

// What an operator has thrown. What libtorch checks without a class of errors of its own
// (TORCH_CHECK) is nearly always about the arguments that it was given.
absl::Status StatusOfOperator(const std::exception_ptr& exception) {
  const absl::Status status = StatusFromException(exception);
  if (!absl::IsInternal(status)) return status;
  bool of_arguments = false;
  try {
    std::rethrow_exception(exception);
  } catch (const c10::LinAlgError&) {  // a singular matrix, for instance
    of_arguments = true;
  } catch (const c10::Error& error) {
    // Others than the plain class are of accelerators, of cuDNN, and the like.
    of_arguments = typeid(error) == typeid(c10::Error) &&
                   !absl::StrContains(status.message(), "INTERNAL ASSERT FAILED");
  } catch (...) {
    return status;
  }
  return of_arguments ? absl::InvalidArgumentError(status.message()) : status;
}

// Whether it is one of the normalizations (batch_norm, instance_norm, native_batch_norm, those of
// cuDNN and MIOpen, and their steps) that write to the running statistics which they are given. The
// schemas of most of them do not say so: libtorch leaves that out for old models. Their backwards
// only read them.
bool KeepsStatistics(const c10::FunctionSchema& schema) {
  if (absl::EndsWith(schema.name(), "_backward")) return false;
  return std::any_of(
      schema.arguments().begin(), schema.arguments().end(),
      [](const c10::Argument& argument) { return absl::StartsWith(argument.name(), "running_"); });
}

// Whether it writes to an argument though its schema does not say so.
bool WritesUnsaid(const c10::FunctionSchema& schema) {
  for (const absl::string_view name : {
           "aten::cov",  // with weights, and one observation: subtracts the mean in place
           "aten::slow_conv_transpose2d",  // gives an input that is no batch one dimension more
           "aten::slow_conv_transpose3d",  // the same
       }) {
    if (schema.name() == name) return true;
  }
  return KeepsStatistics(schema);
}

}  // namespace

absl::StatusOr<std::vector<c10::IValue>> CallOperator(const c10::OperatorHandle& op,
                                                      std::vector<c10::IValue> args) {
  try {
    DG_RETURN_IF_ERROR(Annotate(Fit(op.schema(), args), NameOf(op)));
    op.callBoxed(args);  // takes the arguments off the vector, and leaves the results on it
  } catch (...) {
    return Annotate(StatusOfOperator(std::current_exception()), NameOf(op));
  }
  return args;
}

absl::StatusOr<std::vector<c10::IValue>> CallOperator(absl::string_view name,
                                                      std::vector<c10::IValue> args) {
  DG_ASSIGN_OR_RETURN(const c10::OperatorHandle op, FindOperator(name));
  return CallOperator(op, std::move(args));
}

absl::Status CheckFunctional(absl::string_view name) {
  DG_RETURN_IF_ERROR(CheckSafe(name));
  DG_ASSIGN_OR_RETURN(const c10::OperatorHandle op, FindOperator(name));
  // A peer's arguments and results are copies. Here the indices and values of the result would be
  // those of the arguments, with version counters of their own (see kHiding in operator_policy.cc).
  if (name == "aten::sparse_coo_tensor.indices") {
    return absl::PermissionDeniedError(absl::StrCat(
        "operator ", name,
        " keeps the memory of its arguments, to which it could be written unnoticed by a backward; "
        "aten::to_sparse copies"));
  }
  if (!op.schema().is_mutable() && !WritesUnsaid(op.schema())) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("operator ", name, " writes to its arguments"));
}

}  // namespace distgrad
