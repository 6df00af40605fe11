// Converts values, and runs operators.
#include "core/tensor/operator.h"

#include <ATen/core/List.h>

#include "absl/strings/str_cat.h"
#include "capi/guard.h"
#include "capi/objects.h"

namespace distgrad {
namespace {

absl::StatusOr<bool> ToBool(int64_t value) {
  if (value == 0 || value == 1) return value == 1;
  return absl::InvalidArgumentError(absl::StrCat("a bool that is neither 0 nor 1 but ", value));
}

template <typename T>
c10::IValue ToList(const T* data, size_t size) {
  c10::List<T> list;
  list.reserve(size);
  for (size_t i = 0; i < size; ++i) list.push_back(data[i]);
  return list;
}

absl::StatusOr<c10::IValue> ToTensorList(const dg_tensor* const* data, size_t size) {
  DG_ASSIGN_OR_RETURN(const std::vector<at::Tensor> tensors,
                      PinTensors(data, size, /*allow_null=*/true, "as.tensors.data"));
  c10::List<std::optional<at::Tensor>> optional;
  c10::List<at::Tensor> whole;
  for (const at::Tensor& tensor : tensors) {
    optional.push_back(tensor.defined() ? std::make_optional(tensor) : std::nullopt);
    if (tensor.defined()) whole.push_back(tensor);
  }
  if (whole.size() == size) return c10::IValue(whole);
  return c10::IValue(optional);
}

absl::StatusOr<c10::IValue> FromValue(const dg_value& value) {
  switch (value.kind) {
    case DG_VALUE_NONE:
      return c10::IValue();
    case DG_VALUE_INTEGER:
      return c10::IValue(value.as.integer);
    case DG_VALUE_REAL:
      return c10::IValue(value.as.real);
    case DG_VALUE_BOOL: {
      DG_ASSIGN_OR_RETURN(const bool boolean, ToBool(value.as.integer));
      return c10::IValue(boolean);
    }
    case DG_VALUE_COMPLEX:
      return c10::IValue(c10::complex<double>(value.as.complex.real, value.as.complex.imaginary));
    case DG_VALUE_STRING: {
      DG_ASSIGN_OR_RETURN(std::string text, FromStr(value.as.string, "as.string"));
      return c10::IValue(std::move(text));
    }
    case DG_VALUE_TENSOR: {
      if (value.as.tensor == nullptr) return c10::IValue();
      DG_ASSIGN_OR_RETURN(const Pinned<TensorObject> pinned,
                          Pin<TensorObject>(value.as.tensor, "as.tensor"));
      return c10::IValue(pinned->tensor);
    }
    case DG_VALUE_INTEGERS:
      DG_RETURN_IF_ERROR(CheckArray(value.as.integers.data, value.as.integers.size, "a list"));
      return ToList(value.as.integers.data, value.as.integers.size);
    case DG_VALUE_REALS:
      DG_RETURN_IF_ERROR(CheckArray(value.as.reals.data, value.as.reals.size, "a list"));
      return ToList(value.as.reals.data, value.as.reals.size);
    case DG_VALUE_BOOLS: {
      DG_RETURN_IF_ERROR(CheckArray(value.as.bools.data, value.as.bools.size, "a list"));
      c10::List<bool> list;
      for (size_t i = 0; i < value.as.bools.size; ++i) {
        DG_ASSIGN_OR_RETURN(const bool boolean, ToBool(value.as.bools.data[i]));
        list.push_back(boolean);
      }
      return c10::IValue(list);
    }
    case DG_VALUE_TENSORS:
      return ToTensorList(value.as.tensors.data, value.as.tensors.size);
    default:
      return absl::InvalidArgumentError(absl::StrCat("there is no value of kind ", value.kind));
  }
}

const dg_tensor* Keep(const at::Tensor& tensor, ValuesObject& to) {
  if (!tensor.defined()) return nullptr;
  OwnedHandle<TensorObject> handle(NewTensorHandle(tensor));
  return to.tensors.emplace_back(std::move(handle)).get();
}

absl::StatusOr<dg_value> ToList(const c10::IValue& value, ValuesObject& to) {
  const c10::ArrayRef<c10::IValue> list = value.toListRef();
  if (value.isIntList()) {
    std::vector<int64_t>& kept = to.integers.emplace_back();
    for (const c10::IValue& element : list) kept.push_back(element.toInt());
    return dg_value_integers(kept.data(), kept.size());
  }
  if (value.isDoubleList()) {
    std::vector<double>& kept = to.reals.emplace_back();
    for (const c10::IValue& element : list) kept.push_back(element.toDouble());
    return dg_value_reals(kept.data(), kept.size());
  }
  if (value.isBoolList()) {
    std::vector<uint8_t>& kept = to.bools.emplace_back();
    for (const c10::IValue& element : list) kept.push_back(element.toBool());
    return dg_value_bools(kept.data(), kept.size());
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    std::vector<const dg_tensor*>& kept = to.lists.emplace_back();
    for (const c10::IValue& element : list) {
      kept.push_back(element.isNone() ? nullptr : Keep(element.toTensor(), to));
    }
    return dg_value_tensors(kept.data(), kept.size());
  }
  return absl::UnimplementedError(absl::StrCat("a result of type ", value.type()->str()));
}

absl::StatusOr<dg_value> ToValue(const c10::IValue& value, ValuesObject& to) {
  if (value.isTensor()) return dg_value_tensor(Keep(value.toTensor(), to));
  if (value.isNone()) return dg_value_none();
  if (value.isBool()) return dg_value_bool(value.toBool());
  if (value.isInt()) return dg_value_integer(value.toInt());
  if (value.isDouble()) return dg_value_real(value.toDouble());
  if (value.isComplexDouble()) {
    const c10::complex<double> number = value.toComplexDouble();
    return dg_value_complex(number.real(), number.imag());
  }
  if (value.isString() || value.isDevice()) {
    return dg_value_string(ToStr(
        to.strings.emplace_back(value.isString() ? value.toStringRef() : value.toDevice().str())));
  }
  if (value.isList()) return ToList(value, to);
  return absl::UnimplementedError(absl::StrCat("a result of type ", value.tagKind()));
}

// The tensors of the results, those of lists too.
absl::StatusOr<std::vector<at::Tensor>> Flatten(const std::vector<c10::IValue>& results) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].isTensor()) {
      tensors.push_back(results[i].toTensor());
    } else if (results[i].isTensorList()) {
      for (const c10::IValue& element : results[i].toListRef()) {
        tensors.push_back(element.toTensor());
      }
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "result ", i,
          " is not a tensor: dg_op_call gives results of all kinds (in Rust ops, in C++ Ops)"));
    }
  }
  return tensors;
}

absl::StatusOr<std::vector<c10::IValue>> Call(const std::string& name, const dg_value* arguments,
                                              size_t argument_count) {
  DG_ASSIGN_OR_RETURN(std::vector<c10::IValue> values, FromValues(arguments, argument_count));
  return CallOperator(name, std::move(values));
}

}  // namespace

absl::StatusOr<std::vector<c10::IValue>> FromValues(const dg_value* values, size_t count) {
  DG_RETURN_IF_ERROR(CheckArray(values, count, "arguments"));
  std::vector<c10::IValue> converted;
  converted.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    absl::StatusOr<c10::IValue> value = FromValue(values[i]);
    if (!value.ok()) return Annotate(value.status(), absl::StrCat("argument ", i + 1));
    converted.push_back(*std::move(value));
  }
  return converted;
}

absl::StatusOr<std::unique_ptr<ValuesObject>> ToValues(const std::vector<c10::IValue>& values) {
  auto converted = std::make_unique<ValuesObject>();
  for (const c10::IValue& value : values) {
    DG_ASSIGN_OR_RETURN(const dg_value view, ToValue(value, *converted));
    converted->values.push_back(view);
  }
  return converted;
}

}  // namespace distgrad

using namespace distgrad;

extern "C" {

size_t dg_values_count(const dg_values* values) noexcept {
  return GuardValue<size_t>(0, [&]() -> size_t {
    absl::StatusOr<Pinned<ValuesObject>> pinned = Pin<ValuesObject>(values, "values");
    return pinned.ok() ? (*pinned)->values.size() : 0;
  });
}

dg_error* dg_values_get(const dg_values* values, size_t index, dg_value* out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const Pinned<ValuesObject> pinned, Pin<ValuesObject>(values, "values"));
    if (index >= pinned->values.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no value ", index, " of ", pinned->values.size()));
    }
    *out = pinned->values[index];
    return absl::OkStatus();
  });
}

void dg_values_destroy(dg_values* values) noexcept { DestroyHandle<ValuesObject>(values); }

dg_error* dg_op_call(dg_str op, const dg_value* arguments, size_t argument_count,
                     dg_values** out) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckOut(out));
    DG_ASSIGN_OR_RETURN(const std::string name, FromStr(op, "op"));
    DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> results,
                        Call(name, arguments, argument_count));
    absl::StatusOr<std::unique_ptr<ValuesObject>> values = ToValues(results);
    if (!values.ok()) return Annotate(values.status(), name);
    *out = AdoptHandle(*std::move(values));
    return absl::OkStatus();
  });
}

dg_error* dg_op_check_functional(dg_str op) noexcept {
  return Guard([&]() -> absl::Status {
    DG_ASSIGN_OR_RETURN(const std::string name, FromStr(op, "op"));
    return CheckFunctional(name);
  });
}

dg_error* dg_op_tensors(dg_str op, const dg_value* arguments, size_t argument_count,
                        dg_tensor** outs, size_t out_count) noexcept {
  return Guard([&]() -> absl::Status {
    DG_RETURN_IF_ERROR(CheckArray(outs, out_count, "outs"));
    DG_ASSIGN_OR_RETURN(const std::string name, FromStr(op, "op"));
    DG_ASSIGN_OR_RETURN(const std::vector<c10::IValue> results,
                        Call(name, arguments, argument_count));
    absl::StatusOr<std::vector<at::Tensor>> tensors = Flatten(results);
    if (!tensors.ok()) return Annotate(tensors.status(), name);
    if (tensors->size() != out_count) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": its results are ", tensors->size(), " tensors, not ", out_count));
    }
    // All or nothing.
    std::vector<OwnedHandle<TensorObject>> handles = NewTensorHandles(*tensors);
    for (size_t i = 0; i < out_count; ++i) outs[i] = handles[i].release();
    return absl::OkStatus();
  });
}

}  // extern "C"
