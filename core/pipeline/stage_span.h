// The record of one action of a pipeline's rank, with its times: for traces and pictures.
// docs/pipelines.md.
#ifndef DISTGRAD_CORE_PIPELINE_STAGE_SPAN_H_
#define DISTGRAD_CORE_PIPELINE_STAGE_SPAN_H_

#include <cstdint>

#include "absl/time/time.h"
#include "core/pipeline/schedule.h"

namespace distgrad {

// One action of a rank's list, from its begin to its end. A receive includes the wait for what
// another rank sends; so does the forward of stage 0, which waits for the driver, and that of the
// last stage, which waits for the targets.
struct StageSpan {
  int rank = 0;
  uint64_t step = 0;  // of the pipeline: the same number on all ranks
  Action action = {};
  absl::Time begin = {};
  absl::Time end = {};
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGE_SPAN_H_
