// Runs batches through the stages of a model, which are on several workers, in micro-batches: so
// that while one stage computes one of them, the others compute others. docs/pipelines.md.
//
//   absl::StatusOr<std::unique_ptr<Pipeline>> pipeline = Pipeline::Create(
//       worker.get(), {.name = "model",
//                      .workers = {"front", "back"},                     // by rank
//                      .schedule = *OneForwardOneBackward(2, 8)});
//   Context context = worker->NewContext();
//   absl::StatusOr<PipelineResult> result = (*pipeline)->Train(context, {images}, {labels});
//   absl::Status stepped = optimizer->Step(context);
#ifndef DISTGRAD_CORE_PIPELINE_PIPELINE_H_
#define DISTGRAD_CORE_PIPELINE_PIPELINE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
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
#include "core/pipeline/schedule.h"
#include "core/worker/worker.h"

namespace distgrad {

struct PipelineOptions {
  // The pipeline's name: that of its PipelineStages.
  std::string name = {};
  // The worker of each rank of the schedule; one may be there several times.
  std::vector<std::string> workers = {};
  Schedule schedule = {};
  // What the gradients of a batch are.
  enum class Reduction {
    // Each micro-batch's loss counts by its part of the batch: where the loss is a mean, the sum is
    // that of the whole batch.
    kMean,
    kSum,  // of the losses as they are
  };
  Reduction reduction = Reduction::kMean;
};

struct PipelineResult {
  // The losses by micro-batch, as PipelineStage::loss gave them. None of an evaluation without
  // targets.
  std::vector<at::Tensor> losses;
  // The loss of the batch: their sum, or their mean. Undefined where there are none.
  at::Tensor loss;
  // What the last stage has given, by micro-batch; of an evaluation alone.
  std::vector<std::vector<at::Tensor>> outputs;
};

class Pipeline;

// A step that runs. For one thread at a time. Its Pipeline and its context must outlive it.
class PipelineStep {
 public:
  // None: one that nobody waits for.
  PipelineStep();
  PipelineStep(PipelineStep&& other) noexcept;
  PipelineStep& operator=(PipelineStep&& other) noexcept;
  // Ends the step with kCancelled, if nobody has waited for it, and waits for that as Wait() does.
  ~PipelineStep();

  bool valid() const { return running_ != nullptr; }
  // Waits for the step's end, and returns what Pipeline::Train() does. Once; from then on this is
  // not valid. Not for a function of one of its stages, for which the step may wait.
  absl::StatusOr<PipelineResult> Wait();

 private:
  friend class Pipeline;
  struct Running;
  explicit PipelineStep(std::unique_ptr<Running> running);

  std::unique_ptr<Running> running_;
};

// Thread-safe. No step of it may run when it is destroyed.
class Pipeline {
 public:
  // The worker, which need not have a stage, must outlive the result. kInvalidArgument for a
  // schedule that Check() refuses, or another number of workers than it has ranks.
  static absl::StatusOr<std::unique_ptr<Pipeline>> Create(Worker* worker, PipelineOptions options);

  const std::string& name() const { return options_.name; }

  // Runs a batch forward and backward, and waits. Afterwards each worker has the gradients of its
  // stages in the context, added to what was there, as after Context::Backward: for an Optimizer's
  // step, for ClipGradients(), for an average over replicas. They are added up by micro-batch, in
  // the order of the backwards in the rank's list (all generators: from the first to the last).
  //
  // The first dimension of each tensor is the batch; it is cut into as many micro-batches as the
  // schedule has, of which the first may have one element more than the others. The first stage
  // gets the inputs, the last one's loss the targets. kInvalidArgument for a batch with fewer
  // elements than micro-batches, and for a tensor that requires grad: no gradient goes back to it.
  //
  // The deadline is by default now plus WorkerOptions::timeout. An error names stage, micro-batch
  // and worker, that of a deadline what each rank was doing, and ends the step on all of them; what
  // has reached the context by then is there, so it is good for Release() only. kFailedPrecondition
  // while another step runs on one of the stages, of this Pipeline or of another. Of two that begin
  // at one moment one runs.
  //
  // Where the schedule has steps of the optimizer (Action::Kind::kStep), no stage begins its own
  // any more once this has returned an error, and one that was in it has ended; the error says
  // which stages have stepped. It waits for that until the deadline, or, where that is the default,
  // for another WorkerOptions::timeout; once the deadline has passed, for 2 seconds. For a worker
  // that has not answered by then, or is lost, the error says that it does not know: a step that
  // was in the middle there goes on. For as long it waits for workers that average over replicas
  // (PipelineStagesOptions::averager) to fail their averages; one that has not answered by then is
  // asked again before the next step, which fails if it does not answer then, either. Where a
  // worker did not know the step any more, the next one fails with kFailedPrecondition while that
  // worker still has the averager that it had then: make averager and stages anew. kInvalidArgument
  // for one averager that two workers of one process have.
  absl::StatusOr<PipelineResult> Train(const Context& context, std::vector<at::Tensor> inputs,
                                       std::vector<at::Tensor> targets,
                                       Deadline deadline = absl::InfinitePast());

  // Starts a step as Train() does, and does not wait for its end. It may be started while others of
  // this Pipeline run, and then comes behind them on each rank: so one rank may begin with it while
  // others are still in the step before, and nobody is idle between the two. A rank goes through
  // its whole list before it begins the next step's. So where the schedule has the optimizer's
  // steps (Action::Kind::kStep) the gradients and parameters are those of Train(), called once for
  // each batch, to the last bit. Where it has none, each step starts from the parameters as they
  // are then; which is good for gradients that are to be added up (SumGradients()).
  //
  // The tensors are not copied, and must not be written to before the step has ended. Its deadline,
  // the default one too, counts from this call: what runs before it has to end by then as well.
  //
  // If a step fails, those that were started behind it fail, too, with kFailedPrecondition or its
  // error; what any of them has done by then its own error says. kFailedPrecondition if one that
  // runs has failed already, for a ninth step that nobody has waited for, and while another thread
  // is in this function.
  absl::StatusOr<PipelineStep> Start(const Context& context, std::vector<at::Tensor> inputs,
                                     std::vector<at::Tensor> targets,
                                     Deadline deadline = absl::InfinitePast());

  // Runs forward alone, without gradients; with losses where there are targets.
  // kFailedPrecondition, as of Train(), while a step runs.
  absl::StatusOr<PipelineResult> Evaluate(std::vector<at::Tensor> inputs,
                                          std::vector<at::Tensor> targets = {},
                                          Deadline deadline = absl::InfinitePast());

 private:
  Pipeline(Worker* worker, PipelineOptions options, Schedule evaluation);

  friend class PipelineStep;

  // `alone`: where no other step may run.
  absl::StatusOr<PipelineStep> Start(const Schedule& schedule, const Context& context,
                                     std::vector<at::Tensor> inputs,
                                     std::vector<at::Tensor> targets, Deadline deadline,
                                     bool alone);
  // Waits until the step has ended, and for what Explain() does.
  absl::StatusOr<PipelineResult> Finish(PipelineStep::Running& step);
  // Puts before an error what the ranks say of the step that it has ended: where a deadline has
  // ended it, what each was doing; and which stages have taken their optimizer's step. Waits until
  // none of them is in it, and none begins it any more; and until the ranks that average over
  // replicas (untold_) have failed their averages. Names those of which it does not know that, and
  // leaves them in untold_.
  absl::Status Explain(const absl::Status& failure, const PipelineStep::Running& running);
  // Tells those in untold_ once more.
  absl::Status TellAgain(Deadline deadline);
  // An error where a rank that begins a step has an averager of forgotten_, which is told first.
  absl::Status CheckAverager(int rank, uint64_t averager, Deadline deadline) const;
  // kInvalidArgument where two ranks have one averager: they are workers of one process.
  absl::Status CheckOneEach(const std::vector<uint64_t>& averagers) const;
  // Lets others have the stages of a step that will not be started. A rank on whose way there is no
  // room, or for which there is no memory, is not asked again: it keeps them until the context is
  // released, or the next step begins.
  void GiveBack(const Schedule& schedule, uint64_t step, const std::vector<int>& ranks) const;
  // Calls a function on a rank's worker. `waits`: also for credit, here.
  Future<Message> Ask(absl::string_view function, int rank, std::string payload, Deadline deadline,
                      bool waits = false) const;

  // Takes the right to start a step, which one thread has at a time. `follows`: the step behind
  // which it comes, or 0.
  absl::Status BeginStart(bool alone, uint64_t* follows);
  // Ends the steps that were started behind one that has failed.
  void EndFollowers(uint64_t step, const absl::Status& failure);
  // Returns the error of one behind which this one comes, if somebody has waited for that.
  absl::Status Before(uint64_t step) const;
  // Says that somebody has waited for the step.
  void Forget(uint64_t step);
  // What a rank that averages is to be told of a step that has failed; none where it does not, or
  // has been told.
  std::optional<std::string> Untold(uint64_t step, int rank) const;

  struct InFlight {
    uint64_t step = 0;
    std::shared_ptr<Cancellation> cancellation;
    absl::Status before;  // the error of one behind which this one comes
  };

  Worker* const worker_;
  const uint64_t id_;
  const PipelineOptions options_;
  const Schedule evaluation_;

  mutable absl::Mutex mu_;
  bool starts_ ABSL_GUARDED_BY(mu_) = false;  // a thread is in Start()
  // The steps that nobody has waited for, in their order.
  std::deque<InFlight> in_flight_ ABSL_GUARDED_BY(mu_);
  bool before_failed_ ABSL_GUARDED_BY(mu_) = false;  // one that the one in Start() comes behind
  // By step and rank, of those that run: the ranks that average in them, from before they do; of
  // others, which have failed: those that may not have heard of that, and would average the next
  // step with another one of the other replicas. With what they are to be told.
  std::map<std::pair<uint64_t, int>, std::string> untold_ ABSL_GUARDED_BY(mu_);
  // By the number of its averager, what a rank was told that knew no such step. Its worker is a new
  // one, or its stages were closed: made anew with that averager, which may have averaged, they
  // must not take a step.
  std::map<uint64_t, std::string> forgotten_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_PIPELINE_PIPELINE_H_
