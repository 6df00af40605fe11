// Counts the calls of a worker, by peer and function, each way.
#ifndef DISTGRAD_CORE_RPC_CALL_METRICS_H_
#define DISTGRAD_CORE_RPC_CALL_METRICS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/ids.h"

namespace distgrad {

// The counters of one function with one peer, one way. Thread-safe.
struct CallCounters {
  std::atomic<uint64_t> calls{0};   // begun
  std::atomic<uint64_t> errors{0};  // of those that ended
  std::atomic<uint64_t> ended{0};
  std::atomic<uint64_t> bytes_sent{0};      // made: requests, served: replies; with all tensors
  std::atomic<uint64_t> bytes_received{0};  // the other way
  std::atomic<int64_t> queue_ns{0};         // served: from arrival until the handler began
  // Served: from then until the answer; made: from the call until its end.
  std::atomic<int64_t> run_ns{0};
};

// What the counters of one function with one peer were at one moment.
struct CallStats {
  WorkerRank peer = 0;
  bool served = false;  // the peer's calls of our function; else ours of the peer's
  std::string function = {};
  uint64_t calls = 0;
  uint64_t errors = 0;
  uint64_t in_flight = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  absl::Duration queue_time = {};  // of all calls together; 0 for those that were made
  absl::Duration run_time = {};    // of all that ended together: the handler's, or the whole call's
};

// Thread-safe. The counters live as long as this does.
//
// The caller chooses the name of the function, so a peer has kNames of them each way; calls of
// other names are counted under kOther.
class CallMetrics {
 public:
  static constexpr size_t kNames = 256;
  static constexpr absl::string_view kOther = "(other)";

  CallCounters* Find(WorkerRank peer, bool served, absl::string_view function);
  // Returns the counts by peer, those of calls made before those of calls served.
  std::vector<CallStats> Stats() const;

 private:
  using Table = absl::flat_hash_map<std::string, std::unique_ptr<CallCounters>>;

  mutable absl::Mutex mu_;
  // The counters by twice the peer's rank, plus 1 for calls that were served.
  absl::flat_hash_map<uint32_t, Table> tables_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_CALL_METRICS_H_
