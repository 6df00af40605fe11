#include "core/rpc/store/in_process_store.h"

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace distgrad {
namespace {

// Thread-safe.
class InProcessStore : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override {
    absl::MutexLock lock(&mu_);
    values_[key] = value;
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    absl::MutexLock lock(&mu_);
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return values_.contains(key);
    };
    if (!mu_.AwaitWithDeadline(absl::Condition(&there), deadline)) {
      return absl::DeadlineExceededError(absl::StrCat("nobody has set '", key, "' in the store"));
    }
    return values_[key];
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    absl::MutexLock lock(&mu_);
    int64_t value = 0;
    auto it = values_.find(key);
    if (it != values_.end() && !absl::SimpleAtoi(it->second, &value)) {
      return absl::InvalidArgumentError(absl::StrCat("'", key, "' in the store is not a counter"));
    }
    values_[key] = absl::StrCat(value + amount);
    return value + amount;
  }

 private:
  absl::Mutex mu_;
  absl::flat_hash_map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<Store> NewInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace distgrad
