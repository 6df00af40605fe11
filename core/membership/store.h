// A small map of strings that all workers of a job share, by which they find each other and
// rendezvous. Implementations: core/membership/store (one process, a file, a TCP server);
// store_test.cc there is the suite that each must pass.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/deadline.h"

namespace distgrad {

// Thread-safe. Every call may block: never call it on a pool's or a transport's thread.
//
// Four codes tell what a caller can do when a call fails: kNotFound, the key is not there;
// kDeadlineExceeded, the store itself did not answer in time, and another call may succeed;
// kResourceExhausted, it has no room for what it was to keep, and may have later; kUnavailable, the
// store is gone for good. A store that does not answer is given some seconds, also past the
// deadline: on a busy machine its turn may come late.
//
// Keys are not empty. A key holds either what Set() gave it or a counter of Add(); a counter
// reads as a decimal number.
class Store {
 public:
  // The value of a key; nullopt where it is not there.
  using Value = std::optional<std::string>;
  using Keys = absl::Span<const std::string>;

  virtual ~Store() = default;

  virtual absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Adds to a counter, which starts at 0, and returns its new value; atomic among all workers.
  // kAborted where the answer was lost and it cannot be known whether the store has added.
  virtual absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount,
                                      Deadline deadline) = 0;

  // Removes a key. One that is not there is no error.
  virtual absl::Status Delete(const std::string& key, Deadline deadline) = 0;

  // Returns the value of each key now, in few exchanges however many there are.
  virtual absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) = 0;

  // Waits until some key, of up to 256, holds something else than `seen` says of it, or until the
  // deadline, and returns what each holds then. Where the store can, it tells; otherwise it is
  // asked again and again, ever more rarely.
  virtual absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                         Deadline deadline);

  // Waits until the key is there; kNotFound, with the key's name, if it does not come in time.
  // A deadline in the past only asks.
  virtual absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline);
};

// The part of a store whose keys begin with `prefix`, so that several users of one store do
// not meet.
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix)), store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    return store_->Set(prefix_ + key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    return store_->Add(prefix_ + key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    return store_->Delete(prefix_ + key, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    return store_->GetEach(WithPrefix(keys), deadline);
  }
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    return store_->AwaitChange(WithPrefix(keys), seen, deadline);
  }
  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override {
    return store_->Get(prefix_ + key, deadline);
  }

 private:
  std::vector<std::string> WithPrefix(Keys keys) const {
    std::vector<std::string> all;
    all.reserve(keys.size());
    for (const std::string& key : keys) all.push_back(prefix_ + key);
    return all;
  }

  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_H_
