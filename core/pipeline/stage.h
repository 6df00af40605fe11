// One stage of a pipeline: the functions of its user.
#ifndef DISTGRAD_CORE_PIPELINE_STAGE_H_
#define DISTGRAD_CORE_PIPELINE_STAGE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "core/worker/context.h"

namespace distgrad {

// What a stage computes. All of it runs on one thread of the pipeline's, "dg-stage-N", for each
// rank of a schedule, one function at a time; they may throw, and the step then fails with that,
// with stage and worker.
struct PipelineStage {
  // From what the stage before gives, or the micro-batch, what the next stage gets. The tensors
  // come without history, and the graph is the stage's own; it ends with the micro-batch. So a
  // stage must not write to what it is given, nor keep it with its history.
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor> inputs)> forward;
  // Of the last stage: the loss of a micro-batch, one number, from what forward has given.
  std::function<at::Tensor(std::vector<at::Tensor> outputs, std::vector<at::Tensor> targets)> loss =
      nullptr;
  // What Action::Kind::kStep does, where a schedule has it: with the context of the step, which has
  // this stage's gradients.
  std::function<absl::Status(const Context& context)> step = nullptr;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGE_H_
