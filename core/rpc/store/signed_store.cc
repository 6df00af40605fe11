#include "core/rpc/store/signed_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/base/status.h"
#include "core/rpc/tensorpipe/socket/cluster_key.h"

namespace distgrad {
namespace {

// Thread-safe as the store below it is.
class SignedStore final : public Store {
 public:
  SignedStore(std::string cluster_key, std::shared_ptr<Store> store)
      : cluster_key_(std::move(cluster_key)), store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    DG_ASSIGN_OR_RETURN(const Digest digest, Sign(key, value));
    return store_->Set(key, value + std::string(digest.begin(), digest.end()));
  }

  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override {
    DG_ASSIGN_OR_RETURN(std::string value, store_->Get(key, deadline));
    Digest given = {};
    const bool is_signed = value.size() >= given.size();
    if (is_signed) {
      const size_t size = value.size() - given.size();
      std::copy(value.begin() + size, value.end(), given.begin());
      value.resize(size);
    }
    DG_ASSIGN_OR_RETURN(const Digest expected, Sign(key, value));
    if (is_signed && SameDigest(given, expected)) return value;
    return absl::UnauthenticatedError(absl::StrCat(
        "the store's entry '", key, "' was not written by a worker with our cluster key"));
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    return store_->Add(key, amount);
  }

 private:
  // The length of the key keeps it and the value apart.
  absl::StatusOr<Digest> Sign(absl::string_view key, absl::string_view value) const {
    return Hmac(cluster_key_, absl::StrCat("store ", key.size(), " ", key, value));
  }

  const std::string cluster_key_;
  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> NewSignedStore(std::string cluster_key, std::shared_ptr<Store> store) {
  return std::make_shared<SignedStore>(std::move(cluster_key), std::move(store));
}

}  // namespace distgrad
