#include "core/rpc/store/in_process_store.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/rpc/store/store_errors.h"

namespace distgrad {
namespace {

// Thread-safe.
class InProcessStore final : public Store {
 public:
  absl::Status Set(const std::string& key, const std::string& value) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, value));
    std::lock_guard<std::mutex> lock(mu_);
    values_[key] = value;
    came_.notify_all();
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    const auto there = [&] { return values_.count(key) > 0; };
    std::unique_lock<std::mutex> lock(mu_);
    if (!came_.wait_until(lock, deadline.at(), there)) {
      return KeyDidNotCome(key, "this process");
    }
    return values_[key];
  }

  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    DG_RETURN_IF_ERROR(CheckEntry(key, ""));
    std::lock_guard<std::mutex> lock(mu_);
    int64_t sum = 0;
    const auto before = values_.find(key);
    if (before != values_.end() && !absl::SimpleAtoi(before->second, &sum)) return NotACounter(key);
    sum += amount;
    values_[key] = absl::StrCat(sum);
    came_.notify_all();
    return sum;
  }

 private:
  std::mutex mu_;  // not absl::Mutex, whose timed waits follow the wall clock
  std::condition_variable came_;
  std::map<std::string, std::string> values_;  // guarded by mu_
};

}  // namespace

std::shared_ptr<Store> NewInProcessStore() { return std::make_shared<InProcessStore>(); }

}  // namespace distgrad
