// What a worker did, and when: spans of time, recorded while a trace runs. docs/trace.md says what
// is recorded, chrome_trace.h writes it for people to look at.
#ifndef DISTGRAD_CORE_BASE_TRACE_H_
#define DISTGRAD_CORE_BASE_TRACE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/ids.h"

namespace distgrad {

struct TraceOptions {
  // The memory for spans. Those that do not fit are left out, and counted.
  size_t max_bytes = 64 << 20;
};

struct TraceSpan {
  enum class Kind {
    kCallMade,    // from the call until its end
    kCallServed,  // from its arrival until the answer
    kPass,        // a backward pass, as long as it is in flight on this worker
    kNodes,       // of a pass: nodes that one thread ran in one go
  };

  Kind kind = Kind::kCallMade;
  WorkerRank peer = 0;          // at the other end of a call; the pass's initiator
  std::string function = {};    // of a call
  uint64_t call = 0;            // as its caller numbers it; 0: it failed before it had a number
  Incarnation incarnation = 0;  // served: of the caller
  ContextId context = 0;        // 0: none
  PassId pass = 0;              // 0: none
  uint64_t bytes_sent = 0;      // of a call's packets, with all tensors
  uint64_t bytes_received = 0;
  absl::Time begin = {};
  absl::Time work = absl::InfiniteFuture();  // served: when the handler began, if it did
  absl::Time end = {};
  absl::Status status = {};
};

struct Trace {
  std::string worker = {};  // its name
  WorkerRank rank = 0;
  Incarnation incarnation = 0;
  std::map<WorkerRank, std::string> names = {};  // of all workers, by rank

  absl::Time begin = {};
  absl::Time end = {};
  std::deque<TraceSpan> spans = {};  // by their ends, about
  uint64_t dropped = 0;              // spans that did not fit
};

// Thread-safe.
class TraceRecorder {
 public:
  // Returns whether a trace runs. Ask before a span is made; it costs next to nothing.
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Starts a trace; kFailedPrecondition if one runs.
  absl::Status Start(const TraceOptions& options, absl::Time now);
  // Ends the trace; returns its times, spans and their count. kFailedPrecondition if none runs.
  absl::StatusOr<Trace> Stop(absl::Time now);

  // Ends the span, if there is one. Does nothing if it did not begin in the trace that runs.
  void End(std::unique_ptr<TraceSpan> span, absl::Time end, const absl::Status& status);

 private:
  std::atomic<bool> on_{false};

  absl::Mutex mu_;
  // Guarded by mu_.
  TraceOptions options_ ABSL_GUARDED_BY(mu_);
  size_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Trace trace_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_BASE_TRACE_H_
