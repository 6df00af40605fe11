// Reads the header's JSON event by event: a document of it in memory would be many times its size,
// and would have only the last of two equal keys.
#include "core/checkpoint/safetensors_header.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "nlohmann/json.hpp"

namespace distgrad {
namespace {

using Json = nlohmann::json;
using c10::ScalarType;

constexpr absl::string_view kMetadata = "__metadata__";

struct Dtype {
  absl::string_view name;
  ScalarType type;
};

// In the order of the Python package, which is that of their alignment. The format has two more, of
// 6 bits, which libtorch lacks.
constexpr Dtype kDtypes[] = {
    {"BOOL", ScalarType::Bool},
    {"F4", ScalarType::Float4_e2m1fn_x2},
    {"U8", ScalarType::Byte},
    {"I8", ScalarType::Char},
    {"F8_E5M2", ScalarType::Float8_e5m2},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E8M0", ScalarType::Float8_e8m0fnu},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz},
    {"I16", ScalarType::Short},
    {"U16", ScalarType::UInt16},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"I32", ScalarType::Int},
    {"U32", ScalarType::UInt32},
    {"F32", ScalarType::Float},
    {"C64", ScalarType::ComplexFloat},
    {"F64", ScalarType::Double},
    {"I64", ScalarType::Long},
    {"U64", ScalarType::UInt64},
};

const Dtype* FindDtype(ScalarType type) {
  const auto found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                  [&](const Dtype& each) { return each.type == type; });
  return found == std::end(kDtypes) ? nullptr : found;
}

bool Multiply(int64_t factor, int64_t* product) {
  return !__builtin_mul_overflow(*product, factor, product);
}

// The bytes of a tensor. False if they overflow; also for an empty tensor whose other dimensions
// do, for libtorch multiplies those when it makes strides.
bool CountBytes(const SafetensorsInfo& info, uint64_t* bytes) {
  int64_t product = static_cast<int64_t>(c10::elementSize(info.dtype));
  bool empty = false;
  for (const int64_t dimension : info.shape) {
    empty |= dimension == 0;
    if (dimension != 0 && !Multiply(dimension, &product)) return false;
  }
  *bytes = empty ? 0 : static_cast<uint64_t>(product);
  return true;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Where in the header the reader is.
enum class Place {
  kBeforeHeader,
  kInHeader,
  kInMetadata,
  kInTensor,
  kInShape,
  kInOffsets,
  kAfterHeader,
};

// Takes the JSON's events, each of which says with false that it is the last.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is no integer of 64 bits");
  }
  bool binary(binary_t&) override { return Unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kInOffsets) {
      offsets_.push_back(value);
      return offsets_.size() <= 2 || Wrong("has more than two data_offsets");
    }
    if (place_ != Place::kInShape) return Unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Wrong(absl::StrCat("has a dimension of ", value));
    }
    info_.shape.push_back(static_cast<int64_t>(value));
    return info_.shape.size() <= kMaxSafetensorsDimensions ||
           Wrong(absl::StrCat("has more than ", kMaxSafetensorsDimensions, " dimensions"));
  }

  bool string(string_t& value) override {
    if (place_ == Place::kInMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kInTensor || key_ != "dtype") return Unexpected("a string");
    const auto found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                    [&](const Dtype& each) { return each.name == value; });
    if (found == std::end(kDtypes)) {
      return Wrong(absl::StrCat("has dtype ", QuoteName(value), ", which is not known here"));
    }
    info_.dtype = found->type;
    return true;
  }

  bool key(string_t& value) override {
    switch (place_) {
      case Place::kInHeader:
        name_ = std::move(value);
        if (name_ != kMetadata ? header_.tensors.count(name_) > 0 : has_metadata_) {
          return Wrong("is there twice");
        }
        return true;
      case Place::kInMetadata:
        key_ = std::move(value);
        return header_.metadata.count(key_) == 0 ||
               Wrong(absl::StrCat("has ", QuoteName(key_), " twice"));
      default: {  // in a tensor
        key_ = std::move(value);
        bool* const has = key_ == "dtype"          ? &has_dtype_
                          : key_ == "shape"        ? &has_shape_
                          : key_ == "data_offsets" ? &has_offsets_
                                                   : nullptr;
        if (has == nullptr) return Wrong(absl::StrCat("has an unknown key ", QuoteName(key_)));
        if (*has) return Wrong(absl::StrCat("has ", key_, " twice"));
        *has = true;
        return true;
      }
    }
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kBeforeHeader:
        place_ = Place::kInHeader;
        return true;
      case Place::kInHeader:
        has_metadata_ |= name_ == kMetadata;
        place_ = name_ == kMetadata ? Place::kInMetadata : Place::kInTensor;
        info_ = {};
        offsets_.clear();
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::kInTensor:
        place_ = Place::kInHeader;
        return FinishTensor();
      case Place::kInMetadata:
        place_ = Place::kInHeader;
        return true;
      default:  // what else is open is the header
        place_ = Place::kAfterHeader;
        return true;
    }
  }

  bool start_array(size_t) override {
    if (place_ != Place::kInTensor || key_ == "dtype") return Unexpected("an array");
    place_ = key_ == "shape" ? Place::kInShape : Place::kInOffsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::kInTensor;
    return true;
  }

  // Its text would quote the header at any length.
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    wrong_ = absl::StrCat("is no JSON in UTF-8 at its byte ", position);
    return false;
  }

  absl::StatusOr<SafetensorsHeader> Take() {
    if (!wrong_.empty()) return absl::InvalidArgumentError(absl::StrCat("the header ", wrong_));
    return std::move(header_);
  }

 private:
  bool FinishTensor() {
    if (!has_dtype_) return Wrong("has no dtype");
    if (!has_shape_) return Wrong("has no shape");
    if (!has_offsets_ || offsets_.size() != 2) return Wrong("has no two data_offsets");
    info_.begin = offsets_[0];
    info_.end = offsets_[1];
    if (info_.begin > info_.end) return Wrong("ends before it begins");
    if (info_.dtype == ScalarType::Float4_e2m1fn_x2) {
      if (info_.shape.empty() || info_.shape.back() % 2 != 0) {
        return Wrong("is of dtype F4, and its last dimension is not even");
      }
      info_.shape.back() /= 2;
    }
    uint64_t bytes = 0;
    if (!CountBytes(info_, &bytes)) {
      return Wrong(absl::StrCat("has shape ", ShapeText(info_.shape), ", which is too large"));
    }
    if (bytes != info_.end - info_.begin) {
      return Wrong(absl::StrCat("has ", info_.end - info_.begin, " bytes, where dtype ",
                                SafetensorsDtype(info_.dtype), " and shape ",
                                ShapeText(info_.shape), " need ", bytes));
    }
    header_.tensors.emplace(std::move(name_), std::move(info_));
    return true;
  }

  bool Wrong(absl::string_view what) {
    wrong_ = absl::StrCat("is wrong: ", QuoteName(name_), " ", what);
    return false;
  }
  bool Unexpected(absl::string_view what) {
    if (place_ == Place::kBeforeHeader) {
      wrong_ = absl::StrCat("is wrong: ", what, " is no object");
      return false;
    }
    return Wrong(place_ == Place::kInHeader ? absl::StrCat("is ", what)
                                            : absl::StrCat("has ", what, " in ", QuoteName(key_)));
  }

  Place place_ = Place::kBeforeHeader;
  std::string name_;  // the last key of the header
  std::string key_;   // the last key below it
  SafetensorsInfo info_;
  std::vector<uint64_t> offsets_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false, has_metadata_ = false;
  SafetensorsHeader header_;
  std::string wrong_;
};

absl::Status CheckPlaces(const SafetensorsHeader& header, uint64_t data_bytes) {
  std::vector<const std::pair<const std::string, SafetensorsInfo>*> order;
  order.reserve(header.tensors.size());
  for (const auto& tensor : header.tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::tie(a->second.begin, a->second.end) < std::tie(b->second.begin, b->second.end);
  });
  const std::string* last = nullptr;
  uint64_t end = 0;
  for (const auto* tensor : order) {
    const auto& [name, info] = *tensor;
    if (info.begin < end) {
      return absl::InvalidArgumentError(absl::StrCat("the header is wrong: ", QuoteName(*last),
                                                     " and ", QuoteName(name),
                                                     " have bytes in common"));
    }
    if (info.begin > end) {
      return absl::InvalidArgumentError(absl::StrCat("the header is wrong: the ", info.begin - end,
                                                     " bytes before ", QuoteName(name),
                                                     " are no tensor's"));
    }
    end = info.end;
    last = &name;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there are ", data_bytes, " bytes behind the header, which says that there are ", end,
        end > data_bytes ? ": the file has been cut" : ""));
  }
  return absl::OkStatus();
}

// As a string of JSON; throws for what is not UTF-8.
std::string Quoted(const std::string& text) { return Json(text).dump(); }

}  // namespace

absl::string_view SafetensorsDtype(ScalarType dtype) {
  const Dtype* const found = FindDtype(dtype);
  return found == nullptr ? absl::string_view() : found->name;
}

std::string QuoteName(absl::string_view name) {
  constexpr size_t kMost = 100;
  size_t size = std::min(name.size(), kMost);
  // Not in the middle of a character.
  while (size > 0 && size < name.size() && (static_cast<uint8_t>(name[size]) & 0xc0) == 0x80)
    --size;
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(name.substr(0, size)),
                      size < name.size() ? "...'" : "'");
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_bytes) {
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", json.size(),
                                                   " bytes is more than the format allows, ",
                                                   kMaxSafetensorsHeaderBytes));
  }
  // The parser would pass over a byte order mark, and take a 0 for the end.
  if (json.empty() || json.front() != '{') {
    return absl::InvalidArgumentError("the header does not begin with {");
  }
  if (json.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError("the header has a byte 0");
  }
  HeaderReader reader;
  Json::sax_parse(json.begin(), json.end(), &reader);
  DG_ASSIGN_OR_RETURN(SafetensorsHeader header, reader.Take());
  DG_RETURN_IF_ERROR(CheckPlaces(header, data_bytes));
  return header;
}

absl::StatusOr<SafetensorsLayout> LayOutSafetensors(SafetensorsHeader* header) {
  struct Item {
    const Dtype* dtype;
    const std::string* name;
    SafetensorsInfo* info;
  };
  std::vector<Item> items;
  items.reserve(header->tensors.size());
  for (auto& [name, info] : header->tensors) {
    const auto refuse = [name = &name](const auto&... what) {
      return absl::InvalidArgumentError(absl::StrCat(QuoteName(*name), " ", what...));
    };
    const Dtype* const dtype = FindDtype(info.dtype);
    const bool halves = info.dtype == ScalarType::Float4_e2m1fn_x2;
    if (name == kMetadata) return refuse("is what the format calls the metadata");
    if (dtype == nullptr) {
      return refuse("has dtype ", c10::toString(info.dtype), ", which safetensors does not have");
    }
    if (info.shape.size() > kMaxSafetensorsDimensions) {
      return refuse("has more than ", kMaxSafetensorsDimensions, " dimensions");
    }
    if (halves && info.shape.empty()) return refuse("is of dtype F4 and has no dimension");
    items.push_back({dtype, &name, &info});
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.dtype > b.dtype; });

  SafetensorsLayout layout;
  std::string json = "{";
  const std::string* at = nullptr;  // for the error
  try {
    if (!header->metadata.empty()) {
      absl::StrAppend(&json, "\"", kMetadata, "\":{");
      for (const auto& [key, value] : header->metadata) {
        at = &key;
        absl::StrAppend(&json, Quoted(key), ":", Quoted(value), ",");
      }
      json.back() = '}';
      json += ',';
    }
    uint64_t end = 0;
    for (const Item& item : items) {
      at = item.name;
      std::vector<int64_t> shape = item.info->shape;
      uint64_t bytes = 0;
      const bool halves = item.info->dtype == ScalarType::Float4_e2m1fn_x2;
      if (!CountBytes(*item.info, &bytes) || __builtin_add_overflow(end, bytes, &end) ||
          (halves && !Multiply(2, &shape.back()))) {
        return absl::InvalidArgumentError(absl::StrCat(
            QuoteName(*at), " has shape ", ShapeText(item.info->shape), ", which is too large"));
      }
      item.info->begin = end - bytes;
      item.info->end = end;
      layout.order.push_back(at);
      absl::StrAppend(&json, Quoted(*at), ":{\"dtype\":\"", item.dtype->name, "\",\"shape\":[",
                      absl::StrJoin(shape, ","), "],\"data_offsets\":[", item.info->begin, ",", end,
                      "]},");
    }
  } catch (const Json::exception&) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", absl::CHexEscape(absl::string_view(*at).substr(0, 100)),
                     "' or its value is not UTF-8"));
  }
  if (json.size() > 1) json.pop_back();  // the last comma
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("names, shapes and metadata need a header of ", json.size(),
                     " bytes, which is more than the format allows, ", kMaxSafetensorsHeaderBytes));
  }
  WireWriter writer(&layout.header);
  writer.U64(json.size());
  writer.Raw(json.data(), json.size());
  return layout;
}

}  // namespace distgrad
