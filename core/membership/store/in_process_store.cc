// Keeps entries in a map, and wakes whoever waits for one.
#include "core/membership/store/in_process_store.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/steady_mutex.h"
#include "core/membership/store/store_errors.h"

namespace distgrad {
namespace {

// Thread-safe.
class InProcessStore final : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    SteadyMutexLock lock(&mu_);
    values_.insert_or_assign(key, std::string(value));  // copied first: memory for it may fail
    changed_.NotifyAll();
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    SteadyMutexLock lock(&mu_);
    int64_t sum = 0;
    const auto before = values_.find(key);
    if (before != values_.end() && !absl::SimpleAtoi(before->second, &sum)) return NotACounter(key);
    sum += amount;
    values_.insert_or_assign(key, absl::StrCat(sum));
    changed_.NotifyAll();
    return sum;
  }

  absl::Status Delete(const std::string& key, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    SteadyMutexLock lock(&mu_);
    values_.erase(key);
    changed_.NotifyAll();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline) override {
    DG_RETURN_IF_ERROR(CheckKeys(keys));
    SteadyMutexLock lock(&mu_);
    return ReadLocked(keys);
  }

  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckKeys(keys));
    SteadyMutexLock lock(&mu_);
    for (bool is_over = false;; is_over = !changed_.WaitUntil(&mu_, deadline.at())) {
      std::vector<Value> values = ReadLocked(keys);
      if (is_over || !std::equal(values.begin(), values.end(), seen.begin(), seen.end())) {
        return values;
      }
    }
  }

 private:
  std::vector<Value> ReadLocked(Keys keys) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<Value> values;
    values.reserve(keys.size());
    for (const std::string& key : keys) {
      const auto found = values_.find(key);
      values.push_back(found == values_.end() ? Value() : Value(found->second));
    }
    return values;
  }

  SteadyMutex mu_;
  SteadyCondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::shared_ptr<Store> NewInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace distgrad
