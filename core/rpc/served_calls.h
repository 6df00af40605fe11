// The calls of one peer that are served here: bounds them, and lets the peer take them back.
#ifndef DISTGRAD_CORE_RPC_SERVED_CALLS_H_
#define DISTGRAD_CORE_RPC_SERVED_CALLS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/cancellation.h"
#include "core/base/clock.h"
#include "core/rpc/limits.h"

namespace distgrad {

// Thread-safe.
class ServedCalls {
 public:
  // `total` counts those of all peers; it and the limits must outlive this, the clock Close().
  ServedCalls(Clock* clock, const Limits* limits, std::atomic<size_t>* total)
      : clock_(clock), limits_(limits), total_(total) {}

  // Begins to serve a call. kResourceExhausted past a limit; kAlreadyExists for the number of one
  // that is in flight; kCancelled after Close().
  absl::StatusOr<std::shared_ptr<Cancellation>> Begin(uint64_t call, uint64_t bytes);
  // End a call in two steps: its place is free before its answer goes out, for a caller that has
  // the answer may call again at once; it counts in the total until the answer has gone.
  void FreePlace(uint64_t call);
  void End() { total_->fetch_sub(1); }

  // Cancels a call; does nothing where there is no such call (any more).
  void Cancel(uint64_t call, const absl::Status& why);
  // Cancels all; they still have to end. No more begin.
  void Close(const absl::Status& why);

  size_t count() const;

  // Returns the clock's time; InfinitePast after Close(), when there may be no clock.
  absl::Time Now() const;

 private:
  struct Served {
    uint64_t bytes;
    std::shared_ptr<Cancellation> cancellation;
  };

  Clock* const clock_;
  const Limits* const limits_;
  std::atomic<size_t>* const total_;

  mutable absl::Mutex mu_;
  // Guarded by mu_. clock_ is called under it, so that Close() waits for that.
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<uint64_t, Served> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_SERVED_CALLS_H_
