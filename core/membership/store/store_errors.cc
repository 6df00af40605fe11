// Checks keys and values against the limits that all stores have.
#include "core/membership/store/store_errors.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

std::string Quote(absl::string_view key) { return absl::StrCat("\"", absl::CHexEscape(key), "\""); }

}  // namespace

absl::Status CheckEntry(absl::string_view key, absl::string_view value) {
  if (key.empty()) return absl::InvalidArgumentError("the key of a store entry is empty");
  if (key.size() > kMaxStoreKey) {
    return absl::InvalidArgumentError(absl::StrCat("the key of a store entry has ", key.size(),
                                                   " bytes; the limit is ", kMaxStoreKey));
  }
  if (value.size() > kMaxStoreValue) {
    return absl::InvalidArgumentError(absl::StrCat("the value of ", Quote(key), " has ",
                                                   value.size(), " bytes; the limit is ",
                                                   kMaxStoreValue));
  }
  return absl::OkStatus();
}

absl::Status CheckKeys(Store::Keys keys) {
  for (const std::string& key : keys) DG_RETURN_IF_ERROR(CheckEntry(key, ""));
  return absl::OkStatus();
}

absl::Status NotACounter(absl::string_view key) {
  return absl::InvalidArgumentError(
      absl::StrCat("cannot add to ", Quote(key), ": its value is no number"));
}

}  // namespace distgrad
