// The job's store as one of its processes reaches it: slow, silent for a while, or, once the
// process is dead, not at all.
#ifndef DISTGRAD_TESTS_SIMULATION_STORE_H_
#define DISTGRAD_TESTS_SIMULATION_STORE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "core/membership/store/in_process_store.h"
#include "tests/testing/forwarding_store.h"

namespace distgrad {

// What all processes share. Thread-safe.
struct StoreWeather {
  explicit StoreWeather(uint64_t seed) : random(seed) {}

  absl::Mutex mu;
  std::mt19937_64 random ABSL_GUARDED_BY(mu);
  std::chrono::steady_clock::time_point silent_until ABSL_GUARDED_BY(mu);
  std::set<std::string> keys ABSL_GUARDED_BY(mu);  // that the store has
};

// Thread-safe.
class SimulatedStore final : public ForwardingStore {
 public:
  SimulatedStore(std::shared_ptr<Store> store, std::shared_ptr<StoreWeather> weather)
      : ForwardingStore(std::move(store)), weather_(std::move(weather)) {}

  void Kill() { dead_ = true; }
  // For this process alone, until then.
  void BeSilent(std::chrono::steady_clock::time_point until) { silent_until_ = until; }

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    DG_RETURN_IF_ERROR(Reach(deadline));
    Keep(key, /*is_there=*/true);
    return ForwardingStore::Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    DG_RETURN_IF_ERROR(Reach(deadline));
    Keep(key, /*is_there=*/true);
    return ForwardingStore::Add(key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    DG_RETURN_IF_ERROR(Reach(deadline));
    Keep(key, /*is_there=*/false);
    return ForwardingStore::Delete(key, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    DG_RETURN_IF_ERROR(Reach(deadline));
    return ForwardingStore::GetEach(keys, deadline);
  }

 private:
  void Keep(const std::string& key, bool is_there) {
    absl::MutexLock lock(&weather_->mu);
    if (is_there) {
      weather_->keys.insert(key);
    } else {
      weather_->keys.erase(key);
    }
  }
  absl::Status Reach(Deadline deadline) {
    // The patience of the stores' clients: some seconds, also past the deadline.
    const auto patience = std::max(deadline, Deadline::After(absl::Seconds(5)));
    while (true) {
      absl::Duration wait;
      {
        absl::MutexLock lock(&weather_->mu);
        const auto now = std::chrono::steady_clock::now();
        wait = absl::Microseconds(50 + weather_->random() % 300);
        const auto silent_until = std::max(weather_->silent_until, silent_until_.load());
        if (silent_until <= now) break;
        wait += absl::FromChrono(silent_until - now);
      }
      if (dead_) break;
      if (patience.Passed()) return absl::DeadlineExceededError("the store does not answer");
      absl::SleepFor(std::min({wait, patience.Left() + absl::Microseconds(1), absl::Seconds(1)}));
    }
    absl::SleepFor(absl::Microseconds(100));
    if (dead_) return absl::UnavailableError("this process is dead");
    return absl::OkStatus();
  }

  const std::shared_ptr<StoreWeather> weather_;
  std::atomic<bool> dead_{false};
  std::atomic<std::chrono::steady_clock::time_point> silent_until_{{}};
};

}  // namespace distgrad

#endif  // DISTGRAD_TESTS_SIMULATION_STORE_H_
