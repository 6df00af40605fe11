// What clients send to the server of a store, and what a false server answers them. The first byte
// says which of the two follows: 0 for requests, and else an answer to a question for so many keys.
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/check.h"
#include "core/base/wire.h"
#include "core/membership/store/store_errors.h"
#include "core/membership/store/tcp_store_protocol.h"
#include "tests/fuzz/target.h"

namespace distgrad {
namespace {

// What was read is written again as the same bytes.
void CheckRequest(const StoreRequest& request, absl::string_view bytes) {
  std::string same;
  AppendStoreRequest(request, &same);
  DG_CHECK(same == bytes);
  DG_CHECK(request.value.size() <= kMaxStoreValue);
  if (!request.key.empty()) DG_CHECK(CheckEntry(request.key, request.value).ok());
}

// Returns whether they are requests of a store, all of them whole.
bool ReadRequests(absl::string_view bytes) {
  int taken = 0;
  while (!bytes.empty()) {
    StoreRequest request;
    const absl::StatusOr<size_t> size = DecodeStoreRequest(bytes, &request);
    if (!size.ok() || *size == 0) return false;
    DG_CHECK(*size <= bytes.size());
    CheckRequest(request, bytes.substr(0, *size));
    if (request.kind == StoreRequestKind::kAwait) {
      const absl::StatusOr<StoreAwait> await = DecodeStoreAwait(request.await);
      if (!await.ok()) return false;
      DG_CHECK(await->seen.size() <= kMaxAwaitKeys);
      for (const auto& [key, value] : await->seen) {
        DG_CHECK(CheckEntry(key, value.value_or("")).ok());
      }
      DG_CHECK(EncodeStoreAwait(*await) == request.await);
    }
    bytes.remove_prefix(*size);
    ++taken;
  }
  return taken > 0;
}

bool ReadAnswer(size_t keys, absl::string_view bytes) {
  const absl::StatusOr<std::vector<Store::Value>> values = DecodeStoreAwaitAnswer(bytes, keys);
  if (!values.ok()) return absl::IsResourceExhausted(values.status());
  DG_CHECK(!values->empty() && values->size() <= keys);
  std::string same;
  WireWriter(&same).U32(static_cast<uint32_t>(values->size()));
  for (const Store::Value& value : *values) {
    AppendStoreValue(value.has_value() ? &*value : nullptr, &same);
  }
  DG_CHECK(same == bytes);
  return true;
}

}  // namespace

bool ReadHostile(absl::string_view bytes) {
  if (bytes.empty()) return false;
  const auto keys = static_cast<uint8_t>(bytes[0]);
  bytes.remove_prefix(1);
  return keys == 0 ? ReadRequests(bytes) : ReadAnswer(keys, bytes);
}

std::vector<std::string> GoodInputs() {
  const std::string await =
      EncodeStoreAwait({.milliseconds = 5000, .seen = {{"there", "value"}, {"not there", {}}}});
  const StoreRequest requests[] = {
      {.kind = StoreRequestKind::kValidate, .number = kStoreMagic},
      {.kind = StoreRequestKind::kSet, .key = "key", .value = "value"},
      {.kind = StoreRequestKind::kPing, .number = 7},
      {.kind = StoreRequestKind::kCompareSet, .key = "key", .expected = "old", .value = "new"},
      {.kind = StoreRequestKind::kAdd, .amount = -1, .key = "count"},
      {.kind = StoreRequestKind::kDeleteKey, .key = "key"},
      {.kind = StoreRequestKind::kSession, .session = 1234567890123456789},
      {.kind = StoreRequestKind::kAddOnce, .change = 1, .amount = 1, .key = "count"},
      {.kind = StoreRequestKind::kAwait, .await = await},
      {.kind = StoreRequestKind::kDeleteOnce, .change = 2, .key = "key"},
      {.kind = StoreRequestKind::kSetOnce, .change = 3, .key = "key", .value = ""}};
  std::vector<std::string> inputs;
  for (const StoreRequest& request : requests) {
    inputs.emplace_back(1, '\0');
    AppendStoreRequest(request, &inputs.back());
  }
  const std::string value = "value";
  for (const uint32_t told : {1u, 2u}) {
    inputs.emplace_back(1, '\2');  // of two keys
    WireWriter(&inputs.back()).U32(told);
    AppendStoreValue(&value, &inputs.back());
    if (told == 2) AppendStoreValue(nullptr, &inputs.back());
  }
  inputs.emplace_back(1, '\2');
  WireWriter(&inputs.back()).U32(kStoreFull);
  return inputs;
}

}  // namespace distgrad
