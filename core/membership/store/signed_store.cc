// Signs values as they are written, and checks them as they are read.
#include "core/membership/store/signed_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"
#include "core/net/cluster_key.h"

namespace distgrad {
namespace {

// Thread-safe as the store below it is.
class SignedStore final : public Store {
 public:
  SignedStore(ClusterKey cluster_key, std::shared_ptr<Store> store)
      : cluster_key_(std::move(cluster_key)), store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    DG_ASSIGN_OR_RETURN(const std::string entry, Signed(key, value));
    return store_->Set(key, entry, deadline);
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    return store_->Add(key, amount, deadline);
  }

  absl::Status Delete(const std::string& key, Deadline deadline) override {
    return store_->Delete(key, deadline);
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    DG_ASSIGN_OR_RETURN(std::vector<Value> values, store_->GetEach(keys, deadline));
    return Verified(keys, std::move(values));
  }

  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    std::vector<Value> entries;
    if (cluster_key_.accepted().empty()) {
      for (size_t i = 0; i < keys.size(); ++i) {
        entries.emplace_back();
        if (!seen[i].has_value()) continue;
        DG_ASSIGN_OR_RETURN(entries.back(), Signed(keys[i], *seen[i]));
      }
    } else {
      // Which of the keys an entry is signed with cannot be told from what was seen of it.
      DG_ASSIGN_OR_RETURN(entries, store_->GetEach(keys, deadline));
      DG_ASSIGN_OR_RETURN(std::vector<Value> values, Verified(keys, entries));
      if (!std::equal(values.begin(), values.end(), seen.begin(), seen.end())) return values;
    }
    DG_ASSIGN_OR_RETURN(std::vector<Value> values, store_->AwaitChange(keys, entries, deadline));
    return Verified(keys, std::move(values));
  }

 private:
  absl::StatusOr<std::string> Signed(const std::string& key, const std::string& value) const {
    DG_ASSIGN_OR_RETURN(const Digest digest, Sign(cluster_key_.used(), key, value));
    return value + std::string(digest.begin(), digest.end());
  }

  // The entries without their signatures.
  absl::StatusOr<std::vector<Value>> Verified(Keys keys, std::vector<Value> values) const {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].has_value()) DG_RETURN_IF_ERROR(Verify(keys[i], &*values[i]));
    }
    return values;
  }

  absl::Status Verify(const std::string& key, std::string* value) const {
    Digest given = {};
    const bool is_signed = value->size() >= given.size();
    if (is_signed) {
      const size_t size = value->size() - given.size();
      std::copy(value->begin() + size, value->end(), given.begin());
      value->resize(size);
    }
    for (const std::string* const cluster_key : {&cluster_key_.used(), &cluster_key_.accepted()}) {
      if (cluster_key->empty()) continue;
      DG_ASSIGN_OR_RETURN(const Digest expected, Sign(*cluster_key, key, *value));
      if (is_signed && SameDigest(given, expected)) return absl::OkStatus();
    }
    return absl::UnauthenticatedError(absl::StrCat(
        "the store's entry '", key, "' was not written by a worker with our cluster key (",
        kClusterKeySetting, ")"));
  }

  // The length of the key keeps it and the value apart.
  static absl::StatusOr<Digest> Sign(absl::string_view cluster_key, absl::string_view key,
                                     absl::string_view value) {
    return Hmac(cluster_key, absl::StrCat("store ", key.size(), " ", key, value));
  }

  const ClusterKey cluster_key_;
  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> NewSignedStore(ClusterKey cluster_key, std::shared_ptr<Store> store) {
  return std::make_shared<SignedStore>(std::move(cluster_key), std::move(store));
}

}  // namespace distgrad
