// A store that hands everything on to another, for tests that observe some of it, or hold it up.
#ifndef DISTGRAD_TESTS_TESTING_FORWARDING_STORE_H_
#define DISTGRAD_TESTS_TESTING_FORWARDING_STORE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/membership/store.h"

namespace distgrad {

// Get() and AwaitChange() go through GetEach(), so what overrides that one sees all that is read.
class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    return store_->Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    return store_->Add(key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    return store_->Delete(key, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    return store_->GetEach(keys, deadline);
  }

 private:
  const std::shared_ptr<Store> store_;
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_FORWARDING_STORE_H_
