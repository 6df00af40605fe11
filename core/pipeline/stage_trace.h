// Records what the ranks of pipelines on a worker do, for the file of the worker's trace:
//
//   StageTrace stage_trace;
//   auto stages = PipelineStages::Create(worker.get(), "model", {...},
//                                        {.on_action = stage_trace.Recorder()});
//   absl::Status started = worker->StartTrace();
//   ...
//   file << ToChromeTrace(*worker->StopTrace(), stage_trace.Take());
//
// docs/trace.md.
#ifndef DISTGRAD_CORE_PIPELINE_STAGE_TRACE_H_
#define DISTGRAD_CORE_PIPELINE_STAGE_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/chrome_trace.h"
#include "core/pipeline/stage_span.h"

namespace distgrad {

// Thread-safe.
class StageTrace {
 public:
  // Keeps at most so many actions, the first ones.
  explicit StageTrace(size_t max_spans = 1'000'000);

  // Takes in an action; counts it as dropped if there is no memory for it, so that no step fails
  // because it is traced.
  void Record(const StageSpan& span);
  // Does so, for PipelineStagesOptions::on_action. It may outlive this.
  std::function<void(const StageSpan&)> Recorder() const;

  // What was recorded since the last call: a row for each rank.
  std::vector<RowSpan> Take();
  // How many actions did not fit, in all.
  uint64_t dropped() const;

 private:
  struct Spans;

  const std::shared_ptr<Spans> spans_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGE_TRACE_H_
