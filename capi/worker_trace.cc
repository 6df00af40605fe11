// Puts the rows of pipelines below those of the worker.
#include "capi/worker_trace.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/chrome_trace.h"
#include "core/base/status.h"
#include "core/pipeline/stage_trace.h"

namespace distgrad {

absl::Status WorkerTrace::Start(Worker& worker, const TraceOptions& options) {
  // Made before, for Stop() asks for it once a trace runs.
  auto stages = std::make_shared<StageTrace>(options.max_bytes / sizeof(StageSpan));
  absl::MutexLock lock(&mu_);
  DG_RETURN_IF_ERROR(worker.StartTrace(options));
  stages_ = std::move(stages);
  return absl::OkStatus();
}

absl::StatusOr<std::string> WorkerTrace::Stop(Worker& worker) {
  absl::MutexLock lock(&mu_);
  DG_ASSIGN_OR_RETURN(Trace trace, worker.StopTrace());
  const std::shared_ptr<StageTrace> stages = std::exchange(stages_, nullptr);
  std::vector<RowSpan> rows = stages->Take();
  // A trace has what began while it ran.
  rows.erase(std::remove_if(rows.begin(), rows.end(),
                            [&](const RowSpan& span) { return span.begin < trace.begin; }),
             rows.end());
  trace.dropped += stages->dropped();
  return ToChromeTrace(trace, rows);
}

void WorkerTrace::Record(const StageSpan& span) {
  std::shared_ptr<StageTrace> stages;
  {
    absl::MutexLock lock(&mu_);
    stages = stages_;
  }
  if (stages != nullptr) stages->Record(span);
}

}  // namespace distgrad
