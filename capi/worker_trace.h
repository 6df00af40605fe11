// The trace of a worker that C has started.
#ifndef DISTGRAD_CAPI_WORKER_TRACE_H_
#define DISTGRAD_CAPI_WORKER_TRACE_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "core/base/trace.h"
#include "core/pipeline/stage_span.h"
#include "core/worker/worker.h"

namespace distgrad {

class StageTrace;  // core/pipeline/stage_trace.h

// A worker's trace, and what the ranks of its pipelines do meanwhile. Thread-safe.
class WorkerTrace {
 public:
  absl::Status Start(Worker& worker, const TraceOptions& options);
  // Ends the trace, and returns it in Chrome's trace event format.
  absl::StatusOr<std::string> Stop(Worker& worker);

  // Takes in an action, if a trace runs; counts it as dropped where there is no memory for it.
  void Record(const StageSpan& span);

 private:
  absl::Mutex mu_;
  std::shared_ptr<StageTrace> stages_ ABSL_GUARDED_BY(mu_);  // null: no trace runs
};

}  // namespace distgrad

#endif  // DISTGRAD_CAPI_WORKER_TRACE_H_
