#include "core/rpc/store/in_process_store.h"

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/rpc/store/store_errors.h"

namespace distgrad {
namespace {

// Thread-safe.
class InProcessStore final : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    absl::MutexLock lock(&mu_);
    values_[key] = value;
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    const auto there = [&] {
      mu_.AssertReaderHeld();
      return values_.count(key) > 0;
    };
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithDeadline(absl::Condition(&there), deadline)) {
      return KeyDidNotCome(key, "this process");
    }
    return values_[key];
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    absl::MutexLock lock(&mu_);
    int64_t sum = 0;
    const auto before = values_.find(key);
    if (before != values_.end() && !absl::SimpleAtoi(before->second, &sum)) return NotACounter(key);
    sum += amount;
    values_[key] = absl::StrCat(sum);
    return sum;
  }

 private:
  absl::Mutex mu_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<Store> NewInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace distgrad
