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

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "core/base/deadline.h"
#include "core/pipeline/stage.h"       // IWYU pragma: export
#include "core/pipeline/stage_span.h"  // IWYU pragma: export
#include "core/worker/worker.h"

namespace distgrad {

class GradientAverager;  // core/parallel/process_group/gradient_averager.h

struct PipelineStagesOptions {
  // The number of threads that an operator of a stage may use, beside others that do at the same
  // time. 0: as many as at::get_num_threads() says for the thread that makes the stages, when it
  // does: a later at::set_num_threads() does not reach them; but where the machine has several
  // workers, as the launcher or else their addresses say, or this one has several ranks, no more
  // than the processors that this thread may use then give to each rank of each of them. Set it
  // where each worker was given processors of its own, which that would divide once more.
  int num_threads = 0;
  // Averages the gradients of the stages here over the replicas of the pipeline, in each Train():
  // that of the worker that has these stages in each replica, over all parameters that they train,
  // with GradientAveragerOptions::in_backward = false. A step fails with kFailedPrecondition if it
  // has a gradient for any other parameter, or for one of a worker of the pipeline that has no
  // averager while others have; frozen parameters need none. A rank averages when its own backwards
  // are done, while the ranks before it still have some; with one stage it begins in its last
  // backward. All replicas take the same steps: a step that fails on one, once it runs, fails the
  // group, and with it the step of the others. They go on with new groups, averagers and stages,
  // from the last checkpoint. The worker has one rank of a schedule then, and no other worker has
  // this averager. Null: no replicas.
  //
  // Each replica counts the same, however many rows its part of the batch has, as each rank of
  // PyTorch's DistributedDataParallel does; so with losses that are means the replicas' parts have
  // to be of one size for the mean of the whole batch. Where they are not, let the loss be the sum
  // over the rows times the number of replicas, divided by the rows of all of them, with
  // PipelineOptions::Reduction::kSum.
  std::shared_ptr<GradientAverager> averager = nullptr;
  // Is told of each action of a rank here, after it, on the thread of the rank: ranks of one worker
  // may call it at the same time. Runs in the modes of a new thread. If it throws, the step fails
  // with that.
  std::function<void(const StageSpan& span)> on_action = nullptr;
};

// Thread-safe.
class PipelineStages {
 public:
  // Lets the pipelines of that name, of any worker of the job, use these stages, by their number.
  // The worker must outlive the result. kAlreadyExists if it has some of that name;
  // kInvalidArgument for a name of more than 900 bytes or with a "::" in it, for a number below 0,
  // also of threads, and for a stage without forward.
  static absl::StatusOr<std::unique_ptr<PipelineStages>> Create(Worker* worker, std::string name,
                                                                std::map<int, PipelineStage> stages,
                                                                PipelineStagesOptions options = {});

  // Takes the stages off. A step that runs fails, with kCancelled. Waits until none of their
  // functions runs; false if one still does when the deadline has passed: it goes on, and others
  // may have the name; only the object has to stay. Call it again, then; the worker is not used any
  // more once it has returned true. In one of these functions the deadline must have passed.
  bool Close(Deadline deadline);
  // Calls Close(), without a deadline.
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
