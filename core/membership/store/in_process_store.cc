// Keeps entries in a map, and wakes whoever waits for one.
#include "core/membership/store/in_process_store.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/membership/store/store_errors.h"

namespace distgrad {
namespace {

// Thread-safe.
class InProcessStore final : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    std::lock_guard<std::mutex> lock(mu_);
    values_.insert_or_assign(key, std::string(value));  // copied first: memory for it may fail
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    std::lock_guard<std::mutex> lock(mu_);
    int64_t sum = 0;
    const auto before = values_.find(key);
    if (before != values_.end() && !absl::SimpleAtoi(before->second, &sum)) return NotACounter(key);
    sum += amount;
    values_.insert_or_assign(key, absl::StrCat(sum));
    changed_.notify_all();
    return sum;
  }

  absl::Status Delete(const std::string& key, Deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    std::lock_guard<std::mutex> lock(mu_);
    values_.erase(key);
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline) override {
    DG_RETURN_IF_ERROR(CheckKeys(keys));
    std::lock_guard<std::mutex> lock(mu_);
    return ReadLocked(keys);
  }

  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckKeys(keys));
    std::vector<Value> values;
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait_until(lock, deadline.at(), [&] {
      values = ReadLocked(keys);
      return !std::equal(values.begin(), values.end(), seen.begin(), seen.end());
    });
    return values;
  }

 private:
  std::vector<Value> ReadLocked(Keys keys) const {
    std::vector<Value> values;
    values.reserve(keys.size());
    for (const std::string& key : keys) {
      const auto found = values_.find(key);
      values.push_back(found == values_.end() ? Value() : Value(found->second));
    }
    return values;
  }

  std::mutex mu_;  // not absl::Mutex, whose timed waits follow the wall clock
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;  // guarded by mu_
};

}  // namespace

std::shared_ptr<Store> NewInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace distgrad
