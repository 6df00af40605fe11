// A store that knows which keys it holds, for tests of what is left there.
#ifndef DISTGRAD_TESTS_TESTING_KEY_WATCH_H_
#define DISTGRAD_TESTS_TESTING_KEY_WATCH_H_

#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {

// Thread-safe.
class KeyWatch : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    absl::MutexLock lock(&mu_);
    keys_.insert(key);
    return ForwardingStore::Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    absl::MutexLock lock(&mu_);
    keys_.insert(key);
    return ForwardingStore::Add(key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    absl::MutexLock lock(&mu_);
    keys_.erase(key);
    return ForwardingStore::Delete(key, deadline);
  }

  std::set<std::string> keys() const {
    absl::MutexLock lock(&mu_);
    return keys_;
  }

 private:
  mutable absl::Mutex mu_;
  std::set<std::string> keys_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_TESTING_KEY_WATCH_H_
