// One step on one rank of a pipeline: takes what others send, and interprets the rank's list.
// Private to core/pipeline.
#ifndef DISTGRAD_CORE_PIPELINE_RANK_STEP_H_
#define DISTGRAD_CORE_PIPELINE_RANK_STEP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/cancellation.h"
#include "core/base/deadline.h"
#include "core/base/future.h"
#include "core/base/ids.h"
#include "core/pipeline/schedule.h"
#include "core/pipeline/stage.h"
#include "core/pipeline/stage_run.h"
#include "core/pipeline/stage_span.h"
#include "core/pipeline/step_calls.h"
#include "core/pipeline/step_plan.h"
#include "core/pipeline/tied_gradients.h"
#include "core/pipeline/write_check.h"
#include "core/worker/call_modes.h"
#include "core/worker/worker.h"

namespace distgrad {

class GradientAverager;  // core/parallel/process_group/gradient_averager.h

// Fails the averages of a worker's stages, because of a step of theirs: the replicas' next steps
// would not fit together. May wait for the job's store.
void FailAverages(GradientAverager& averager, const std::string& pipeline, const Worker& worker,
                  const absl::Status& why);

// Thread-safe, but for Run(), which one thread calls, once.
class RankStep : public std::enable_shared_from_this<RankStep> {
 public:
  // What all steps of a worker's stages have in common. All of it outlives them.
  struct Common {
    Worker* worker = nullptr;
    std::string pipeline = {};
    const std::map<int, PipelineStage>* stages = nullptr;
    const std::function<void(const StageSpan& span)>* on_action = nullptr;  // may be empty
    GradientAverager* averager = nullptr;  // null: there are no replicas
  };

  // Its driver is who makes the request, whose context it takes. `follows`: the step that
  // StepPlan::follows names; null where it names none.
  static std::shared_ptr<RankStep> Create(Common common, StepPlan plan, Request& request,
                                          std::shared_ptr<RankStep> follows);
  // Use Create().
  RankStep(Common common, StepPlan plan, Request& request, std::shared_ptr<RankStep> follows);

  // The names of this rank's tied parameters, each once.
  TieNames tie_names() const;
  // kInvalidArgument unless the gradients of the rank can be added to those of tied parameters, and
  // averaged over replicas, if they are: between all backwards and the first step.
  absl::Status CheckShares() const;
  // kInvalidArgument for a skip of a stage of this rank that does not lead past the next stage.
  absl::Status CheckSkips() const;
  // kFailedPrecondition for a stage of this rank that is to step, and has no function for it: it
  // would find that out when others have stepped. kInvalidArgument if the step comes behind another
  // one, and this rank would read a tied parameter while another rank of the worker steps it.
  absl::Status CheckSteps() const;

  // Returns whether gradients are averaged over replicas in this step.
  bool averages() const { return plan_.backward && averager_ != nullptr; }

  const StepPlan& plan() const { return plan_; }
  WorkerRank driver() const { return driver_; }
  // Whether its driver has its stages for itself: until the step has ended; or nobody will start
  // it, for its deadline has passed, or its context was released, as with the loss of the driver.
  bool HoldsStages() const;
  // Ends a step that nobody will start, as HoldsStages() says, and returns whether it is one.
  bool StopIfAbandoned();
  // Whether a function of its stages may still run: longer, if it was stopped.
  bool busy() const;
  // What the rank does at this moment, or did when it was stopped: "waits in the receive ...".
  std::string Describe() const;
  // Whether some stages of the two ranks, or all, are the same.
  bool SharesStagesWith(const RankStep& other) const;
  bool HasSameStagesAs(const RankStep& other) const;

  // Whether the step before it has ended here, or will never run: so that this one may run. The
  // messages that start the two may come in any order.
  bool MayRun() const { return follows_ == nullptr || follows_->is_over_; }
  // OK once it has come to a good end here. Else why it has not; of one that runs, or was not
  // started, kFailedPrecondition.
  absl::Status CheckEndedWell() const;

  // Takes in what the step is to run with; the first call. The future is done when it has ended.
  absl::StatusOr<Future<Message>> Start(const Request& request);
  // Takes in what it has to know of the other ranks, before Start().
  absl::Status Tie(Ties ties);
  // Follows the list, on a thread that may wait.
  void Run();
  // Ends the step with an error, unless it has ended. Does not wait for a function that runs.
  void Stop(const absl::Status& why) { cancellation_->Cancel(why); }

  // Says that the step as a whole has failed. Stops it, and begins none of its stages' steps from
  // then on. If the rank averages, its averages fail, also where it has ended well already; that
  // may wait for the job's store. The future is done when none of the steps runs any more, with
  // those that have (Stepped).
  Future<Message> End(const absl::Status& why);

  // Takes the tensors of a parcel; or leaves them, and says why.
  absl::Status Deliver(const Parcel& parcel, Tensors& tensors);

 private:
  using Cell = std::pair<int, int>;  // stage and micro-batch
  struct Delivered {
    Tensors tensors;
    std::vector<bool> wanted;      // by tensor
    std::vector<StageSkip> skips;  // of activations: those that end there, or later
  };
  // What goes past the stages between, by the stage at the other end.
  using Skipping = std::map<int, Delivered>;
  using ParcelKey = std::tuple<Parcel::Kind, int, int, int>;  // stage, micro-batch, other stage
  using DeliveredParcels = std::map<ParcelKey, std::optional<Delivered>>;  // none: was taken

  enum class State : uint8_t {
    kBegun,     // takes what others send, and waits for Start()
    kRunning,   // follows its list, and then waits until what it has sent was taken in
    kStopping,  // has failed; a function of a stage may still run
    kOver,
  };
  enum class Event : uint8_t { kStart, kStop, kEndOfList };
  // Makes all transitions. Returns whether there was one: an event that comes too late changes
  // nothing.
  bool Advance(Event event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool over() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return state_ == State::kStopping || state_ == State::kOver;
  }
  // Of one that has begun: whether its driver may start it yet.
  bool MayBeStarted() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void OnStop();
  // The step of a stage has run.
  void OnStepped(int stage, const absl::Status& status);

  absl::StatusOr<Message> FollowList();
  absl::Status Follow(const Action& action);
  CallModes modes() const {
    absl::MutexLock lock(&mu_);
    return modes_;
  }
  absl::Status Do(const Action& action);
  absl::Status Forward(const PipelineStage& stage, Cell cell);
  absl::Status Backward(Action::Kind kind, Cell cell);
  void Send(Parcel::Kind kind, int to_stage, int micro_batch, Delivered what, int other = 0);
  // Takes what skips to a stage of this rank, and puts it behind its inputs.
  absl::Status ReceiveSkips(Cell cell, Delivered& in);
  // Takes what is to skip out of what a stage has given, and hands it over or keeps it for
  // SendSkips().
  absl::Status CutSkips(Cell cell, Delivered& out);
  // Sends what the stage has for others than its neighbours. Comes behind what the neighbour waits
  // for.
  void SendSkips(Parcel::Kind kind, Cell cell, std::map<Cell, Skipping>& what);
  // Put the gradients of what has skipped behind those that the next stage gives, and take them out
  // of those of the inputs.
  absl::Status ReceiveSkipGradients(Cell cell, Tensors& gradients);
  void CutSkipGradients(Cell cell, Tensors& gradients);
  absl::Status Recompute(Cell cell);
  // Average the gradients over the replicas: what comes from now on, which is from the last
  // backward; and what is left of it.
  absl::Status BeginAverage();
  absl::Status Average();
  // Fails the averages, if there are some, for this replica's step is not that of the others.
  void FailAverages(const absl::Status& why);
  // kFailedPrecondition for a parameter whose gradient is not averaged though others are: each
  // replica would train it by itself, and nobody would hear of it.
  absl::Status CheckIsAveraged(const at::Tensor& parameter) const;
  // Adds the gradients of tied parameters of all ranks to the context.
  absl::Status AddTied();
  // The tied parameters of that name of this rank, each once.
  Tensors TiedOf(const std::string& name) const;
  // The ranks of this worker that have that very tensor under the name.
  std::set<int> RanksWithTied(const std::string& name, const at::Tensor& parameter) const;
  // What it does beyond its list; null: nothing.
  absl::Status SetPhase(const char* phase);
  absl::Status CheckRead(const WriteCheck& read, absl::string_view what, Cell cell) const;
  // Waits for a parcel.
  absl::StatusOr<Delivered> Await(Parcel::Kind kind, Cell cell, int other = 0);
  Message Result();

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
  const std::function<void(const StageSpan& span)>& on_action_;  // may be empty
  GradientAverager* const averager_;
  const StepPlan plan_;
  const WorkerRank driver_;
  const Deadline begin_deadline_;  // nobody starts it later

  // Synchronizes itself. Ends the step, and all that it has asked of others; keeps why.
  const std::shared_ptr<Cancellation> cancellation_ = std::make_shared<Cancellation>();

  // Null once Run() has it, and where that will not be called: else steps that were begun behind
  // each other, and never started, would keep each other. Written under mu_; from Start() to Run()
  // constant, so that MayRun() reads it without.
  std::shared_ptr<RankStep> follows_;
  std::atomic<bool> is_over_{false};  // whether the state is kOver

  // State of Run() alone, once it is called. (Before Start() the context is guarded by mu_.)
  Context context_;
  std::unique_ptr<StepCalls> calls_;
  std::map<Cell, StageRun> runs_;
  std::map<Cell, Delivered> inputs_;                 // of forwards that are next
  std::map<Cell, Tensors> gradients_;                // of outputs, for backwards that are next
  std::map<Cell, Delivered> to_next_, to_previous_;  // what is to be sent; by its maker
  // The same, of what goes past the stages between.
  std::map<Cell, Skipping> skips_, skip_gradients_;
  // What has come to the one stage from the other, of this rank.
  std::map<std::pair<Cell, int>, Delivered> skipped_, skipped_gradients_;
  // How many of a stage's last inputs have skipped to it from where, in their order.
  std::map<Cell, std::vector<std::pair<int, size_t>>> skip_inputs_;
  std::map<Cell, WriteCheck> outputs_read_;  // what stages gave, until it is read no more
  // What was given back, by its maker and the stage that gets it and may write to it from then on;
  // as outputs_read_.
  std::map<std::pair<Cell, int>, WriteCheck> gradients_read_;
  std::map<Cell, std::pair<WriteCheck, WriteCheck>> given_;  // inputs and targets; to recompute
  std::map<Cell, Tensors> fingerprints_;                     // of outputs; to recompute
  std::map<int, at::Tensor> losses_;                         // by micro-batch
  std::map<int, Tensors> outputs_;  // of the last stage, where there is no backward
  TiedGradients tied_;
  std::string averages_elsewhere_;  // the worker of a rank that averages, where this one does not

  mutable absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kBegun;
  std::optional<Promise<Message>> promise_ ABSL_GUARDED_BY(mu_);  // of a step that runs
  DeliveredParcels delivered_ ABSL_GUARDED_BY(mu_);
  Deadline deadline_ ABSL_GUARDED_BY(mu_) = Deadline::Never();
  CallModes modes_ ABSL_GUARDED_BY(mu_);                 // of the thread that runs the step
  const Action* action_ ABSL_GUARDED_BY(mu_) = nullptr;  // that it does, or did when it failed
  bool waits_ ABSL_GUARDED_BY(mu_) = false;              // for what others send
  const char* phase_ ABSL_GUARDED_BY(mu_) = nullptr;     // beyond its list; also when it failed
  Ties ties_ ABSL_GUARDED_BY(mu_);
  bool steps_ ABSL_GUARDED_BY(mu_) = false;  // a stage, at this moment
  Stepped stepped_ ABSL_GUARDED_BY(mu_);     // false also for one that steps at this moment
  std::vector<Promise<Message>> ends_ ABSL_GUARDED_BY(mu_);  // of those who wait until none does
  bool ran_ ABSL_GUARDED_BY(mu_) = false;                    // had its thread before its end
  bool ended_well_ ABSL_GUARDED_BY(mu_) = false;             // its list, before anybody stopped it
  absl::Status error_ ABSL_GUARDED_BY(mu_);                  // of its list, or of all of the step
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_RANK_STEP_H_
