// --trace of the examples that train on workers.
#ifndef DISTGRAD_EXAMPLES_TRACE_FILE_H_
#define DISTGRAD_EXAMPLES_TRACE_FILE_H_

#include <fstream>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/pipeline/stage_trace.h"
#include "core/worker/worker.h"

namespace distgrad {

// The file that a worker's trace goes to, if there is to be one. For one thread.
class TraceFile {
 public:
  // Opens "trace.1.json" of "trace.json" for worker 1: before it trains, so that a name that
  // cannot be opened is an error at once. With an empty name there is no trace.
  static absl::StatusOr<TraceFile> Open(const std::string& name, int rank);

  bool wanted() const { return file_.is_open(); }

  // For PipelineStagesOptions::on_action: the trace has rows of what the stages do. Null if there
  // is to be no trace.
  std::function<void(const StageSpan&)> StageRecorder() const;

  // Starts the worker's trace.
  absl::Status Start(Worker& worker);
  // Ends it, and writes it.
  absl::Status Finish(Worker& worker);

 private:
  std::ofstream file_;
  StageTrace stages_;
};

}  // namespace distgrad

#endif  // DISTGRAD_EXAMPLES_TRACE_FILE_H_
