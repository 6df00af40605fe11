// Says once, in ForEachField(), which fields each kind of request has: for writing and for reading.
#include "core/membership/store/tcp_store_protocol.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/membership/store/store_errors.h"

namespace distgrad {
namespace {

absl::Status Malformed() { return absl::InvalidArgumentError("no request of a store"); }

// Gives `fields` each field of a request of that kind, in the order in which they are sent. Returns
// false if there is no such kind.
template <typename Request, typename Fields>
bool ForEachField(Request& request, Fields&& fields) {
  switch (request.kind) {
    case StoreRequestKind::kValidate:
    case StoreRequestKind::kPing:
      fields.Number(request.number);
      return true;
    case StoreRequestKind::kSet:
      fields.Key(request.key);
      fields.Text(request.value);
      return true;
    case StoreRequestKind::kCompareSet:
      fields.Key(request.key);
      fields.Text(request.expected);
      fields.Text(request.value);
      return true;
    case StoreRequestKind::kAdd:
      fields.Key(request.key);
      fields.Number(request.amount);
      return true;
    case StoreRequestKind::kDeleteKey:
      fields.Key(request.key);
      return true;
    case StoreRequestKind::kSession:
      fields.Number(request.session);
      return true;
    case StoreRequestKind::kAddOnce:
      fields.Number(request.change);
      fields.Key(request.key);
      fields.Number(request.amount);
      return true;
    case StoreRequestKind::kAwait:
      fields.Await(request.await);
      return true;
    case StoreRequestKind::kDeleteOnce:
      fields.Number(request.change);
      fields.Key(request.key);
      return true;
    case StoreRequestKind::kSetOnce:
      fields.Number(request.change);
      fields.Key(request.key);
      fields.Text(request.value);
      return true;
  }
  return false;
}

class FieldWriter {
 public:
  explicit FieldWriter(std::string* out) : writer_(out) {}

  void Number(uint32_t number) { writer_.U32(number); }
  void Number(uint64_t number) { writer_.U64(number); }
  void Number(int64_t number) { writer_.I64(number); }
  void Key(absl::string_view key) { Text(absl::StrCat("/", key)); }
  void Text(absl::string_view text) {
    writer_.U64(text.size());
    writer_.Raw(text.data(), text.size());
  }
  void Await(absl::string_view await) { writer_.Bytes(await); }

 private:
  WireWriter writer_;
};

// Once a field is not there, or can be none, the others are empty.
class FieldReader {
 public:
  explicit FieldReader(absl::string_view in) : reader_(in) {}

  void Number(uint32_t& number) { number = reader_.U32(); }
  void Number(uint64_t& number) { number = reader_.U64(); }
  void Number(int64_t& number) { number = reader_.I64(); }
  void Key(absl::string_view& key) {
    key = Sized(reader_.U64(), kMaxStoreKey + 1);
    if (!whole()) return;
    if (key.size() < 2 || key[0] != '/') {
      can_be_ = false;
      return;
    }
    key.remove_prefix(1);
  }
  void Text(absl::string_view& text) { text = Sized(reader_.U64(), kMaxStoreValue); }
  void Await(absl::string_view& await) { await = Sized(reader_.U32(), kMaxAwaitBytes); }

  bool can_be() const { return can_be_; }  // false: no request has such a field
  bool whole() const { return can_be_ && reader_.ok(); }
  size_t remaining() const { return reader_.remaining(); }

 private:
  absl::string_view Sized(uint64_t size, size_t most) {
    if (!whole()) return {};
    if (size > most) {
      can_be_ = false;
      return {};
    }
    const absl::string_view rest = reader_.Rest();
    const absl::string_view text = rest.substr(0, static_cast<size_t>(size));
    reader_ = WireReader(rest.substr(text.size()));
    if (text.size() == size) return text;
    reader_.U8();  // no longer ok()
    return {};
  }

  WireReader reader_;
  bool can_be_ = true;
};

// What a key holds.
Store::Value ReadValue(WireReader& reader, bool* fits) {
  const uint8_t there = reader.U8();
  if (there > 1) *fits = false;
  if (there != 1) return std::nullopt;
  const absl::string_view value = reader.Bytes();
  if (value.size() > kMaxStoreValue) *fits = false;
  return std::string(value);
}

}  // namespace

void AppendStoreRequest(const StoreRequest& request, std::string* out) {
  WireWriter(out).U8(static_cast<uint8_t>(request.kind));
  DG_CHECK(ForEachField(request, FieldWriter(out))) << static_cast<int>(request.kind);
}

absl::StatusOr<size_t> DecodeStoreRequest(absl::string_view in, StoreRequest* request) {
  if (in.empty()) return 0;
  *request = {};
  request->kind = static_cast<StoreRequestKind>(in[0]);
  FieldReader fields(in.substr(1));
  if (!ForEachField(*request, fields) || !fields.can_be()) return Malformed();
  if (!fields.whole()) return 0;
  return in.size() - fields.remaining();
}

std::string EncodeStoreAwait(const StoreAwait& await) {
  std::string bytes;
  WireWriter writer(&bytes);
  writer.U32(await.milliseconds);
  for (const auto& [key, value] : await.seen) {
    writer.Bytes(key);
    AppendStoreValue(value.has_value() ? &*value : nullptr, &bytes);
  }
  return bytes;
}

absl::StatusOr<StoreAwait> DecodeStoreAwait(absl::string_view bytes) {
  WireReader reader(bytes);
  StoreAwait await;
  await.milliseconds = reader.U32();
  bool fits = true;
  while (fits && reader.ok() && reader.remaining() > 0) {
    const absl::string_view key = reader.Bytes();
    Store::Value value = ReadValue(reader, &fits);
    fits = fits && CheckEntry(key, "").ok() && await.seen.size() < kMaxAwaitKeys;
    if (fits) await.seen.emplace_back(std::string(key), std::move(value));
  }
  if (!fits || !reader.ok()) return Malformed();
  return await;
}

void AppendStoreValue(const std::string* value, std::string* out) {
  WireWriter writer(out);
  writer.U8(value != nullptr ? 1 : 0);
  if (value != nullptr) writer.Bytes(*value);
}

absl::StatusOr<std::vector<Store::Value>> DecodeStoreAwaitAnswer(absl::string_view answer,
                                                                 size_t keys) {
  WireReader reader(answer);
  const uint32_t told = reader.U32();
  if (told == kStoreFull) return absl::ResourceExhaustedError("it is full");
  bool fits = told > 0 && told <= keys;
  std::vector<Store::Value> values;
  for (uint32_t i = 0; i < told && fits && reader.ok(); ++i) {
    values.push_back(ReadValue(reader, &fits));
  }
  if (!fits || !reader.ok() || reader.remaining() > 0) {
    return absl::InternalError("an answer to another question");
  }
  return values;
}

}  // namespace distgrad
