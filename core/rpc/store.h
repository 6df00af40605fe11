// A small map of strings that all workers of a job share while they find each other.
// Implementations: core/rpc/store (one process, a file, a TCP server); store_test.cc there is
// the suite that each must pass.
#ifndef DISTGRAD_CORE_RPC_STORE_H_
#define DISTGRAD_CORE_RPC_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/deadline.h"

namespace distgrad {

// Thread-safe. Every call may block: never call it on a pool's or a transport's thread.
//
// Three codes tell what a caller can do when a call fails: kNotFound, the key is not there;
// kDeadlineExceeded, the store itself did not answer in time, and another call may succeed;
// kUnavailable, the store is gone for good.
//
// Keys are not empty. A key holds either what Set() gave it or a counter of Add(); a counter
// reads as a decimal number.
class Store {
 public:
  virtual ~Store() = default;

  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;

  // Waits until the key is there; kNotFound, with the key's name, if it does not come in time.
  // A deadline in the past only asks. A store that does not answer is given some seconds more.
  virtual absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) = 0;

  // Adds to a counter, which starts at 0, and returns its new value; atomic among all workers.
  // kAborted where the answer was lost and it cannot be known whether the store has added.
  virtual absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) = 0;
};

// The part of a store whose keys begin with `prefix`, so that several users of one store do
// not meet.
class PrefixStore : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix)), store_(std::move(store)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    return store_->Set(prefix_ + key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override {
    return store_->Get(prefix_ + key, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    return store_->Add(prefix_ + key, amount);
  }

 private:
  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_STORE_H_
