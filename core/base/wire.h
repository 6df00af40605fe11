// Numbers and strings as bytes, and back: fixed width, little-endian, no padding, no types.
//
//   std::string bytes;
//   WireWriter writer(&bytes);
//   writer.U32(7);
//   writer.Str16("name");
//
//   WireReader reader(bytes);
//   const uint32_t seven = reader.U32();
//   const absl::string_view name = reader.Str16();
//   DG_RETURN_IF_ERROR(reader.status("the greeting"));
//
// What is read is hostile until checked: a reader never looks past its end, whatever a length
// in the bytes says.
#ifndef DISTGRAD_CORE_BASE_WIRE_H_
#define DISTGRAD_CORE_BASE_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/check.h"

namespace distgrad {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the codec copies bytes as they stand");

// Appends to a string that outlives it. For one thread.
class WireWriter {
 public:
  explicit WireWriter(std::string* out) : out_(out) {}

  void U8(uint8_t value) { Number(value); }
  void U16(uint16_t value) { Number(value); }
  void U32(uint32_t value) { Number(value); }
  void U64(uint64_t value) { Number(value); }
  void I64(int64_t value) { Number(value); }
  void F64(double value) { Number(value); }

  // A length and the bytes. The caller has checked that the length fits.
  void Bytes(absl::string_view value) { Sized<uint32_t>(value); }
  void Str16(absl::string_view value) { Sized<uint16_t>(value); }

  // The bytes alone.
  void Raw(const void* data, size_t size) {
    if (size > 0) out_->append(static_cast<const char*>(data), size);
  }

 private:
  template <typename T>
  void Number(T value) {
    Raw(&value, sizeof(value));
  }
  template <typename Length>
  void Sized(absl::string_view value) {
    DG_CHECK(value.size() <= std::numeric_limits<Length>::max()) << value.size() << " bytes";
    Number(static_cast<Length>(value.size()));
    Raw(value.data(), value.size());
  }

  std::string* const out_;
};

// Reads from bytes that outlive it and what it returns. Once something was not there, it and
// all that follows read as 0 or empty, and ok() is false. For one thread.
class WireReader {
 public:
  explicit WireReader(absl::string_view bytes) : rest_(bytes) {}

  uint8_t U8() { return Number<uint8_t>(); }
  uint16_t U16() { return Number<uint16_t>(); }
  uint32_t U32() { return Number<uint32_t>(); }
  uint64_t U64() { return Number<uint64_t>(); }
  int64_t I64() { return Number<int64_t>(); }
  double F64() { return Number<double>(); }

  absl::string_view Bytes() { return Take(U32()); }
  absl::string_view Str16() { return Take(U16()); }

  // Copies `size` bytes out; clears them and returns false if there are fewer.
  bool Raw(void* data, size_t size) {
    const absl::string_view bytes = Take(size);
    if (!ok_) {
      if (size > 0) std::memset(data, 0, size);
      return false;
    }
    if (size > 0) std::memcpy(data, bytes.data(), size);
    return true;
  }

  // All that is left; nothing is left after it.
  absl::string_view Rest() { return Take(rest_.size()); }

  bool ok() const { return ok_; }
  size_t remaining() const { return rest_.size(); }

  // kInvalidArgument, naming `what` was read, if anything was not there.
  absl::Status status(absl::string_view what) const {
    if (ok_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(what, " ends too early"));
  }

 private:
  absl::string_view Take(size_t size) {
    if (size > rest_.size()) Fail();
    if (!ok_) return {};
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  template <typename T>
  T Number() {
    static_assert(std::is_arithmetic_v<T>);
    T value = 0;
    const absl::string_view bytes = Take(sizeof(T));
    if (ok_) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  void Fail() {
    ok_ = false;
    rest_ = {};
  }

  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_WIRE_H_
