// The job's store as one of its processes reaches it: by the client that production has, over
// simulated sockets; and once the process is dead, not at all.
#ifndef DISTGRAD_TESTS_SIMULATION_STORE_H_
#define DISTGRAD_TESTS_SIMULATION_STORE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/base/status.h"
#include "core/membership/store/tcp_store.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sockets.h"

namespace distgrad::simulation {

// All keys that any process has ever set. Thread-safe.
struct KeysEverSet {
  absl::Mutex mu;
  std::set<std::string> keys ABSL_GUARDED_BY(mu);
};

// Thread-safe. Whoever uses it does so as that process, as where a check has another one's group
// fail.
class StoreOfProcess final : public Store {
 public:
  // `process`: its number, that of InProcess.
  StoreOfProcess(int process, std::unique_ptr<TcpStore> store, std::shared_ptr<KeysEverSet> keys)
      : process_(process), store_(std::move(store)), keys_(std::move(keys)) {}

  // `silently`: as KillSockets().
  void Kill(bool silently) {
    dead_ = true;
    KillSockets(process_, silently);
  }

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    const InProcess in_process(process_);
    DG_RETURN_IF_ERROR(Begin(&key));
    return End(store_->Set(key, value, deadline));
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    const InProcess in_process(process_);
    DG_RETURN_IF_ERROR(Begin(&key));
    return End(store_->Add(key, amount, deadline));
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    const InProcess in_process(process_);
    DG_RETURN_IF_ERROR(Begin());
    return End(store_->Delete(key, deadline));
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    const InProcess in_process(process_);
    DG_RETURN_IF_ERROR(Begin());
    return End(store_->GetEach(keys, deadline));
  }
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    const InProcess in_process(process_);
    DG_RETURN_IF_ERROR(Begin());
    return End(store_->AwaitChange(keys, seen, deadline));
  }

 private:
  absl::Status Begin(const std::string* sets = nullptr) {
    if (dead_) return absl::UnavailableError("this process is dead");
    if (sets != nullptr) {
      absl::MutexLock lock(&keys_->mu);
      keys_->keys.insert(*sets);
    }
    return absl::OkStatus();
  }
  template <typename Result>
  Result End(Result result) {
    if (!result.ok() && dead_) return absl::UnavailableError("this process is dead");
    return result;
  }

  const int process_;
  const std::unique_ptr<TcpStore> store_;
  const std::shared_ptr<KeysEverSet> keys_;
  std::atomic<bool> dead_{false};
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_STORE_H_
