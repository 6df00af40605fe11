// The stages of a pipeline that a worker has.
//
//   absl::StatusOr<std::unique_ptr<PipelineStages>> stages = PipelineStages::Create(
//       worker.get(), "model",
//       {{1, {.forward = [&](std::vector<at::Tensor> in) { return std::vector{head(in[0])}; },
//             .loss = [](std::vector<at::Tensor> out, std::vector<at::Tensor> targets) {
//               return at::cross_entropy_loss(out[0], targets[0]);
//             }}}});
//   ...                                       // on every worker, before the first step
//
// pipeline.h runs steps over them.
#ifndef DISTGRAD_CORE_PIPELINE_STAGES_H_
#define DISTGRAD_CORE_PIPELINE_STAGES_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/worker/context.h"
#include "core/worker/worker.h"

namespace distgrad {

// What a stage computes. All of it runs on one thread of the pipeline's, "dg-stage-N", for each
// rank of a schedule, one function at a time; they may throw, and the step then fails with that,
// with stage and worker.
struct Stage {
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

// Thread-safe.
class PipelineStages {
 public:
  // Lets the pipelines of that name, of whichever worker of the job, use these stages, by their
  // number. The worker must outlive the result. kAlreadyExists if it has some of that name;
  // kInvalidArgument for a name of more than 900 bytes or with a "::" in it, for a number below 0,
  // and for a stage without forward.
  static absl::StatusOr<std::unique_ptr<PipelineStages>> Create(Worker* worker, std::string name,
                                                                std::map<int, Stage> stages);

  // Takes the stages off. A step that runs fails; waits until none of their functions does.
  ~PipelineStages();
  PipelineStages(const PipelineStages&) = delete;
  PipelineStages& operator=(const PipelineStages&) = delete;

 private:
  class Impl;
  explicit PipelineStages(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  const std::shared_ptr<Impl> impl_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_STAGES_H_
