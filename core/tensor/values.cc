// Writes values by their type, and reads them back, checked.
#include "core/tensor/values.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/tensor/exception.h"

// The payload is
//
//   u8 version, u32 values, and for each value its u8 tag and what belongs to it
//
// Lengths are u64. A tensor is the next one of the message.
namespace distgrad {
namespace {

constexpr uint8_t kVersion = 1;

enum Tag : uint8_t {
  kNone = 0,
  kBool = 1,     // u8
  kInt = 2,      // i64
  kDouble = 3,   // f64
  kComplex = 4,  // f64 twice
  kString = 5,   // length and bytes
  kDevice = 6,   // u8 type, u8 index + 1
  kTensor = 7,
  kBools = 8,             // length and u8s
  kInts = 9,              // length and i64s
  kDoubles = 10,          // length and f64s
  kTensors = 11,          // length
  kOptionalTensors = 12,  // length and for each a u8: whether it is there
  kStrings = 13,          // length and for each its length and bytes
  kComplexes = 14,        // length and f64s, twice as many
  kMixed = 15,            // length and as many values, none of them a tensor or a list
};

absl::Status Encode(const c10::IValue& value, WireWriter& writer, std::vector<at::Tensor>& tensors);

void EncodeString(const std::string& text, WireWriter& writer) {
  writer.U64(text.size());
  writer.Raw(text.data(), text.size());
}

void EncodeComplex(c10::complex<double> value, WireWriter& writer) {
  writer.F64(value.real());
  writer.F64(value.imag());
}

template <typename Type>
bool IsListOf(const c10::IValue& value) {
  return value.toList().elementType()->kind() == Type::Kind;
}

absl::Status EncodeList(const c10::IValue& value, WireWriter& writer,
                        std::vector<at::Tensor>& tensors) {
  const c10::ArrayRef<c10::IValue> list = value.toListRef();
  const Tag tag = value.isIntList()                   ? kInts
                  : value.isDoubleList()              ? kDoubles
                  : value.isBoolList()                ? kBools
                  : value.isTensorList()              ? kTensors
                  : value.isOptionalTensorList()      ? kOptionalTensors
                  : IsListOf<c10::StringType>(value)  ? kStrings
                  : IsListOf<c10::ComplexType>(value) ? kComplexes
                                                      : kMixed;
  writer.U8(tag);
  writer.U64(list.size());
  for (const c10::IValue& element : list) {
    if (tag == kInts) writer.I64(element.toInt());
    if (tag == kDoubles) writer.F64(element.toDouble());
    if (tag == kBools) writer.U8(element.toBool());
    if (tag == kStrings) EncodeString(element.toStringRef(), writer);
    if (tag == kComplexes) EncodeComplex(element.toComplexDouble(), writer);
    if (tag == kOptionalTensors) writer.U8(!element.isNone());
    if (tag == kTensors || (tag == kOptionalTensors && !element.isNone())) {
      tensors.push_back(element.toTensor());
    }
    if (tag == kMixed) {
      if (element.isTensor() || element.isList()) {
        return absl::UnimplementedError(
            absl::StrCat("a value of type ", value.type()->str(), " cannot be sent"));
      }
      DG_RETURN_IF_ERROR(Encode(element, writer, tensors));
    }
  }
  return absl::OkStatus();
}

absl::Status Encode(const c10::IValue& value, WireWriter& writer,
                    std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    writer.U8(kTensor);
    tensors.push_back(value.toTensor());
  } else if (value.isNone()) {
    writer.U8(kNone);
  } else if (value.isBool()) {
    writer.U8(kBool);
    writer.U8(value.toBool());
  } else if (value.isInt()) {
    writer.U8(kInt);
    writer.I64(value.toInt());
  } else if (value.isDouble()) {
    writer.U8(kDouble);
    writer.F64(value.toDouble());
  } else if (value.isComplexDouble()) {
    writer.U8(kComplex);
    EncodeComplex(value.toComplexDouble(), writer);
  } else if (value.isString()) {
    writer.U8(kString);
    EncodeString(value.toStringRef(), writer);
  } else if (value.isDevice()) {
    writer.U8(kDevice);
    writer.U8(static_cast<uint8_t>(value.toDevice().type()));
    writer.U8(static_cast<uint8_t>(value.toDevice().index() + 1));
  } else if (value.isList()) {
    return EncodeList(value, writer, tensors);
  } else {
    return absl::UnimplementedError(
        absl::StrCat("a value of type ", value.tagKind(), " cannot be sent"));
  }
  return absl::OkStatus();
}

// Reads values one after the other. For one thread.
class Decoder {
 public:
  // Takes the tensors out of `message`, which must outlive the decoder.
  Decoder(Message& message, uint64_t most_bytes)
      : tensors_(message.tensors), reader_(message.payload), most_bytes_(most_bytes) {}

  absl::StatusOr<std::vector<c10::IValue>> Run() {
    const uint8_t version = reader_.U8();
    const uint32_t count = reader_.U32();
    DG_RETURN_IF_ERROR(reader_.status("the list of values"));
    if (version != kVersion) {
      return absl::InvalidArgumentError(
          absl::StrCat("values of version ", version, ", not ", kVersion));
    }
    if (count > reader_.remaining()) return absl::InvalidArgumentError("too few values");
    std::vector<c10::IValue> values;
    if (Take(count, sizeof(c10::IValue))) values.reserve(count);
    for (uint32_t i = 0; i < count && !is_too_large_; ++i) {
      c10::IValue value = Value(reader_.U8());
      if (problem_ == nullptr && !reader_.ok()) problem_ = "it ends too early";
      if (is_too_large_) break;
      if (problem_ != nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("value ", i, ": ", problem_));
      }
      values.push_back(std::move(value));
    }
    if (is_too_large_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "its values would take more than ", most_bytes_,
          " bytes beside the elements of tensors; limit message_bytes is ", most_bytes_));
    }
    if (reader_.remaining() != 0 || next_tensor_ != tensors_.size()) {
      return absl::InvalidArgumentError("more was sent than the values need");
    }
    return values;
  }

 private:
  c10::IValue Value(uint8_t tag) {
    switch (tag) {
      case kNone:
        return {};
      case kBool:
        return Bool();
      case kInt:
        return reader_.I64();
      case kDouble:
        return reader_.F64();
      case kComplex:
        return Complex();
      case kString:
        return String();
      case kDevice:
        return Device();
      case kTensor:
        return Tensor();
      case kBools:
        return List<bool>(Length(1), [this] { return Bool(); });
      case kInts:
        return List<int64_t>(Length(8), [this] { return reader_.I64(); });
      case kDoubles:
        return List<double>(Length(8), [this] { return reader_.F64(); });
      case kTensors: {
        const uint64_t length = reader_.U64();
        if (length > tensors_.size() - next_tensor_) return Fail("its tensors are missing");
        return List<at::Tensor>(length, [this] { return Tensor(); });
      }
      case kOptionalTensors:
        return List<std::optional<at::Tensor>>(Length(1), [this]() -> std::optional<at::Tensor> {
          if (!Bool()) return std::nullopt;
          return Tensor();
        });
      case kStrings:
        return List<std::string>(Length(8), [this] { return String(); });
      case kComplexes:
        return List<c10::complex<double>>(Length(16), [this] { return Complex(); });
      case kMixed: {
        c10::impl::GenericList list(c10::AnyType::get());
        size_t left = Length(1);
        if (!TakeList(left)) return {};
        list.reserve(left);
        for (; left > 0 && problem_ == nullptr; --left) {
          const uint8_t inner = reader_.U8();
          list.push_back(inner <= kDevice ? Value(inner) : Fail("a list within a list"));
        }
        return list;
      }
      default:
        return Fail("unknown tag");
    }
  }

  c10::complex<double> Complex() {
    Take(1, 48);  // on the heap, in a value
    const double real = reader_.F64();
    return {real, reader_.F64()};
  }

  std::string String() {
    const size_t length = Length(1);
    // With the object that has it in a value.
    if (!Take(1, length + 64)) return {};
    std::string text(length, '\0');
    reader_.Raw(text.data(), text.size());
    return text;
  }

  // Whether so much memory may be taken; for once, and nothing else is read.
  bool Take(uint64_t count, uint64_t bytes) {
    // Neither is more than the payload has bytes.
    is_too_large_ = is_too_large_ || count * bytes > most_bytes_ - taken_;
    if (is_too_large_) {
      Fail("it is too large");
      return false;
    }
    taken_ += count * bytes;
    return true;
  }
  // The same for a list of values, and the object that has them.
  bool TakeList(uint64_t length) { return Take(1, 64 + length * sizeof(c10::IValue)); }

  // A length, of which there is enough left; else 0.
  size_t Length(size_t element_bytes) {
    const uint64_t length = reader_.U64();
    if (length <= reader_.remaining() / element_bytes) return length;
    Fail("it ends too early");
    return 0;
  }

  template <typename T, typename Next>
  c10::IValue List(size_t length, Next next) {
    c10::List<T> list;
    if (!TakeList(length)) return {};
    list.reserve(length);
    for (size_t i = 0; i < length && problem_ == nullptr; ++i) list.push_back(next());
    return list;
  }

  bool Bool() {
    const uint8_t value = reader_.U8();
    if (value > 1) Fail("a bool that is neither 0 nor 1");
    return value == 1;
  }

  c10::IValue Device() {
    const auto type = static_cast<int8_t>(reader_.U8());
    const int index = int{reader_.U8()} - 1;
    if (type < 0 || type >= at::COMPILE_TIME_MAX_DEVICE_TYPES || index > INT8_MAX ||
        (type == 0 && index > 0)) {
      return Fail("unknown device");
    }
    return at::Device(static_cast<at::DeviceType>(type), static_cast<at::DeviceIndex>(index));
  }

  at::Tensor Tensor() {
    if (next_tensor_ == tensors_.size()) {
      Fail("its tensor is missing");
      return {};
    }
    return std::move(tensors_[next_tensor_++]);
  }

  c10::IValue Fail(const char* problem) {
    if (problem_ == nullptr) problem_ = problem;
    return {};
  }

  std::vector<at::Tensor>& tensors_;
  WireReader reader_;
  size_t next_tensor_ = 0;
  const uint64_t most_bytes_;
  uint64_t taken_ = 0;
  bool is_too_large_ = false;
  const char* problem_ = nullptr;  // the first
};

}  // namespace

absl::StatusOr<Message> EncodeValues(absl::Span<const c10::IValue> values) {
  Message message;
  WireWriter writer(&message.payload);
  writer.U8(kVersion);
  writer.U32(static_cast<uint32_t>(values.size()));
  absl::Status status;
  size_t done = 0;
  try {
    for (; done < values.size(); ++done) {
      status = Encode(values[done], writer, message.tensors);
      if (!status.ok()) break;
    }
  } catch (...) {
    status = StatusFromException(std::current_exception());
  }
  if (!status.ok()) return Annotate(status, absl::StrCat("value ", done));
  return message;
}

absl::StatusOr<std::vector<c10::IValue>> DecodeValues(Message message, uint64_t most_bytes) {
  try {
    return Decoder(message, most_bytes).Run();
  } catch (...) {
    return StatusFromException(std::current_exception());
  }
}

}  // namespace distgrad
