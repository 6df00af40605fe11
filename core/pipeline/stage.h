// One stage of a pipeline: the functions of its user.
#ifndef DISTGRAD_CORE_PIPELINE_STAGE_H_
#define DISTGRAD_CORE_PIPELINE_STAGE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "core/worker/context.h"

namespace distgrad {

// What a stage computes. All of it runs on one thread of the pipeline's, "dg-stage-N", for each
// rank of a schedule, one function at a time; they may throw, and the step then fails with that,
// with stage and worker.
struct PipelineStage {
  // Makes of what the stage before gives, or of the micro-batch, what the next stage gets. The
  // tensors come without history, and the graph is the stage's own; it ends with the micro-batch.
  // So a stage must not write to what it is given, nor keep it with its history; nor write again to
  // what it has returned, before the micro-batch's backward has come, or the evaluation is over.
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor> inputs)> forward;
  // Returns the loss of a micro-batch, one number, from what forward has given; for the last stage.
  // With a backward it is real.
  std::function<at::Tensor(std::vector<at::Tensor> outputs, std::vector<at::Tensor> targets)> loss =
      nullptr;
  // The numbers of tensors that forward and loss take; with any other number the step fails, and
  // they are not called. std::nullopt: they take any.
  std::optional<int> inputs = 1;
  std::optional<int> targets = 1;
  // The stages to which the last outputs of forward skip, one for each: with {3, 2} the last but
  // one goes straight to stage 3, and the last to stage 2, and the next stage gets those before.
  // Each is later than the next stage; it gets the tensors that skip to it behind those of the
  // stage before it, by the number of the stage that they come from. Their gradients come back as
  // straight.
  std::vector<int> skips = {};
  // Whether forward and loss run a second time, in the backward (activation checkpointing): until
  // then a micro-batch keeps what the stage was given, and no activations. The second run draws the
  // random numbers of the first from the default generators of the CPU and of the inputs' devices;
  // the step fails if another thread of the process has drawn from these meanwhile.
  bool recompute = false;
  // Parameters that other stages have as well, each under the same name there: the embedding of
  // the first stage and the scores of the last, for instance. They are leaves that require grad;
  // those of one name have the same sizes, dtype and device, and, to stay the same, the same first
  // values and the same optimizer. When a rank's backwards are done it waits for those of the other
  // ranks that have one of its names, and each of them has the sum of all their gradients then, to
  // the last bit the same; it is sparse where all of them are. Post-accumulate hooks are not called
  // for them. With steps in flight ranks of one worker must not have one tensor for it.
  std::map<std::string, at::Tensor> tied = {};
  // What Action::Kind::kStep does, where a schedule has it (WithSteps(); else nothing calls this,
  // and nothing is trained unless an optimizer steps after Train()): with the context of the step,
  // which has this stage's gradients. Runs in the modes of a new thread, as an optimizer's step
  // beside a forward under autocast does: without autocast, and with gradient mode on. Null: a step
  // of such a schedule is refused with kFailedPrecondition.
  std::function<absl::Status(const Context& context)> step = nullptr;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGE_H_
