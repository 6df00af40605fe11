// One step on one rank of a pipeline: takes what others send, and interprets the rank's list.
// Private to core/pipeline.
#ifndef DISTGRAD_CORE_PIPELINE_RANK_STEP_H_
#define DISTGRAD_CORE_PIPELINE_RANK_STEP_H_

#include <ATen/ThreadLocalState.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stage.h"
#include "core/pipeline/stage_run.h"
#include "core/pipeline/step_plan.h"
#include "core/worker/worker.h"

namespace distgrad {

// Thread-safe, but for Run(), which one thread calls, once.
class RankStep : public std::enable_shared_from_this<RankStep> {
 public:
  // The worker and the stages outlive it; `driver` has begun it.
  RankStep(Worker* worker, std::string pipeline, const std::map<int, PipelineStage>* stages,
           StepPlan plan, WorkerId driver, Context context);

  uint64_t step() const { return plan_.step; }
  WorkerId driver() const { return driver_; }
  // Whether it was started, and has not ended.
  bool running() const;
  // Whether a function of its stages may still run: longer, if it was stopped.
  bool busy() const;
  // Whether some stages of the two ranks, or all, are the same.
  bool SharesStagesWith(const RankStep& other) const;
  bool HasSameStagesAs(const RankStep& other) const;

  // Takes in what it is to run with. The future is done when it has ended; the first call.
  absl::StatusOr<Future<Message>> Start(const Request& request);
  // On a thread that may wait.
  void Run();
  // Ends it with an error, unless it has ended. Does not wait for a function that runs.
  void Stop(const absl::Status& why);

  absl::Status Deliver(const Parcel& parcel, Tensors tensors);

 private:
  using Cell = std::pair<int, int>;  // stage and micro-batch
  struct Delivered {
    Tensors tensors;
    std::vector<bool> wanted;  // by tensor
  };
  using ParcelKey = std::tuple<Parcel::Kind, int, int>;

  void RunList();
  absl::Status Do(const Action& action);
  absl::Status Forward(const PipelineStage& stage, Cell cell);
  absl::Status Backward(Action::Kind kind, Cell cell);
  absl::Status Send(Parcel::Kind kind, int to_stage, int micro_batch, Delivered what);
  // Waits for it.
  absl::StatusOr<Delivered> Await(Parcel::Kind kind, Cell cell);
  absl::Status stopped() const;

  bool HasStage(int stage) const {
    return stage < plan_.stages() && plan_.rank_of_stage[stage] == plan_.rank;
  }
  bool IsLast(int stage) const { return stage == plan_.stages() - 1; }
  // Whether another rank has that stage.
  bool IsElsewhere(int stage) const {
    return stage >= 0 && stage < plan_.stages() && plan_.rank_of_stage[stage] != plan_.rank;
  }

  // Constant after construction.
  Worker* const worker_;
  const std::string pipeline_;
  const std::map<int, PipelineStage>& stages_;
  const StepPlan plan_;
  const WorkerId driver_;

  // Of Run() alone, once it is called.
  Context context_;
  std::map<Cell, StageRun> runs_;
  std::map<Cell, Delivered> inputs_;                 // of forwards that are next
  std::map<Cell, Tensors> gradients_;                // of outputs, for backwards that are next
  std::map<Cell, Delivered> to_next_, to_previous_;  // what is to be sent; by who has made it
  std::map<int, at::Tensor> losses_;                 // by micro-batch
  std::map<int, Tensors> outputs_;  // of the last stage, where there is no backward

  // Synchronizes itself.
  Promise<Message> promise_;
  const Future<Message> future_ = promise_.future();

  mutable absl::Mutex mu_;
  bool started_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  bool list_done_ ABSL_GUARDED_BY(mu_) = false;  // no function of a stage runs any more
  absl::Status why_ ABSL_GUARDED_BY(mu_);        // of an end before its time
  std::map<ParcelKey, std::optional<Delivered>> delivered_ ABSL_GUARDED_BY(mu_);  // none: was taken
  std::shared_ptr<Cancellation> cancellation_ ABSL_GUARDED_BY(mu_);
  Deadline deadline_ ABSL_GUARDED_BY(mu_) = Deadline::Never();
  std::optional<at::ThreadLocalState> modes_ ABSL_GUARDED_BY(mu_);  // of whoever runs the step
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_RANK_STEP_H_
