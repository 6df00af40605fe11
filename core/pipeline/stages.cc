// Gives each rank that runs here a thread, and each step that others begin to its rank.
#include "core/pipeline/stages.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <deque>
#include <list>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/await_memory.h"
#include "core/base/cancellation.h"
#include "core/base/processors.h"
#include "core/base/sleepers.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "core/parallel/process_group/gradient_averager.h"
#include "core/pipeline/rank_step.h"
#include "core/pipeline/step_plan.h"
#include "core/tensor/intra_op_threads.h"

namespace distgrad {
namespace {

// The most steps of a rank that have not ended: more than one driver has in flight
// (kMostStepsInFlight), as those that it has given up may still have to end.
constexpr size_t kMostStepsOfRank = 64;

// The thread of one rank. Thread-safe.
class RankThread {
 public:
  ~RankThread() {
    Close();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Start(int rank) {
    absl::StatusOr<std::thread> thread =
        StartThread(absl::StrCat("dg-stage-", rank), [this] { RunAll(); });
    DG_RETURN_IF_ERROR(thread.status());
    thread_ = *std::move(thread);
    return absl::OkStatus();
  }
  // Steps with how many threads their operators use.
  using Steps = std::list<std::pair<std::shared_ptr<RankStep>, int>>;
  // Needs no memory.
  void Run(Steps steps) {
    absl::MutexLock lock(&mu_);
    steps_.splice(steps_.end(), steps);
  }
  // Has it look again at what may run: some step will not be started.
  void LookAgain() { absl::MutexLock lock(&mu_); }
  // It ends when it has run what it was given.
  void Close() {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }
  // Of one that is closed: whether it has run all by then, and runs nothing any more.
  bool AwaitIdle(Deadline deadline) {
    absl::MutexLock lock(&mu_);
    return waiting_.Await(&mu_, absl::Condition(this, &RankThread::Idle), deadline);
  }

 private:
  void RunAll() {
    while (true) {
      std::shared_ptr<RankStep> step;
      int threads = 0;
      {
        absl::MutexLock lock(&mu_);
        mu_.Await(absl::Condition(this, &RankThread::HasWork));
        if (steps_.empty()) return;
        const auto next = FirstThatMayRun();
        std::tie(step, threads) = *next;
        steps_.erase(next);
        runs_ = true;
      }
      SetIntraOpThreadsHere(threads);  // also where the step before had others
      step->Run();
      step = nullptr;
      absl::MutexLock lock(&mu_);
      runs_ = false;
      waiting_.WakeAll();
    }
  }

  Steps::const_iterator FirstThatMayRun() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::find_if(steps_.begin(), steps_.end(),
                        [](const auto& step) { return step.first->MayRun(); });
  }
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return steps_.empty() ? closed_ : FirstThatMayRun() != steps_.end();
  }
  bool Idle() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !runs_ && steps_.empty(); }

  std::thread thread_;  // constant after Start()

  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool runs_ ABSL_GUARDED_BY(mu_) = false;  // a step
  Sleepers waiting_ ABSL_GUARDED_BY(mu_);   // until it is idle
  Steps steps_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

// Thread-safe.
class PipelineStages::Impl {
 public:
  Impl(Worker* worker, std::string name, std::map<int, PipelineStage> stages,
       PipelineStagesOptions options)
      : worker_(worker),
        worker_name_(worker->name()),
        name_(std::move(name)),
        stages_(std::move(stages)),
        options_(options) {}

  absl::StatusOr<Message> Begin(Request& request) {
    DG_ASSIGN_OR_RETURN(StepPlan plan, DecodePlan(request.message.payload));
    const int first_stage = FirstStage(plan.rank_of_stage, plan.rank);
    for (int s = plan.stages() - 1; s >= first_stage; --s) {
      if (plan.rank_of_stage[s] != plan.rank || stages_.count(s) > 0) continue;
      return absl::NotFoundError(absl::StrCat("worker '", worker_->name(), "' has no stage ", s,
                                              " of pipeline '", name_, "'"));
    }
    // A part of the model would not be trained, and nobody would hear of it.
    if (const int last = stages_.rbegin()->first; last >= plan.stages()) {
      return absl::InvalidArgumentError(
          absl::StrCat("worker '", worker_->name(), "' has stage ", last, " of pipeline '", name_,
                       "', and the stages of the schedule are ", plan.stages(), ", from 0"));
    }
    if (plan.backward && !request.context.valid()) {
      return absl::InvalidArgumentError("a step with a backward is one of a context");
    }
    const int rank = plan.rank;
    std::shared_ptr<RankStep> follows;
    if (plan.follows != 0) {
      DG_ASSIGN_OR_RETURN(follows, FindToFollow(plan));
    }
    const auto step = RankStep::Create({.worker = worker_,
                                        .pipeline = name_,
                                        .stages = &stages_,
                                        .on_action = &options_.on_action,
                                        .averager = options_.averager.get()},
                                       std::move(plan), request, std::move(follows));
    DG_RETURN_IF_ERROR(step->CheckShares());
    DG_RETURN_IF_ERROR(step->CheckSkips());
    DG_RETURN_IF_ERROR(step->CheckSteps());
    StopAbandoned();
    std::vector<std::shared_ptr<RankStep>> before;  // steps of the same stages
    RankThread* thread = nullptr;
    // Some of these end here, outside the lock.
    std::vector<std::shared_ptr<RankStep>> all, earlier;
    std::deque<std::shared_ptr<RankStep>> over;
    {
      absl::MutexLock lock(&mu_);
      if (closed_) return Closed();
      before = StepsThatShareStagesWith(*step);
      DG_RETURN_IF_ERROR(CheckMayBegin(*step, before));
      Rank& own = ranks_[first_stage];
      if (own.thread == nullptr) {
        auto thread = std::make_unique<RankThread>();
        DG_RETURN_IF_ERROR(thread->Start(rank));
        own.thread = std::move(thread);
      }
      all = own.AllSteps();
      over = own.over;
      for (const std::shared_ptr<RankStep>& each : all) {
        // One that this one follows may be started yet.
        const bool is_over = !each->busy() && (step->plan().follows == 0 || !each->HoldsStages());
        if (is_over) {
          over.push_back(each);
        } else {
          earlier.push_back(each);
        }
      }
      if (earlier.size() >= kMostStepsOfRank) {
        return absl::ResourceExhaustedError(absl::StrCat(
            earlier.size(), " steps of pipeline '", name_, "' that were begun on worker '",
            worker_->name(), "' have not ended, and there can be no more"));
      }
      // From here on nothing needs memory.
      own.earlier.swap(earlier);
      own.over.swap(over);
      while (own.over.size() > kMostStepsInFlight) own.over.pop_front();
      own.step = step;
      thread = own.thread.get();
    }
    // One of the same Pipeline ends here, unless this one comes behind it; all others have ended,
    // or will not be started, and what comes behind one of those waits for its end.
    for (const std::shared_ptr<RankStep>& each : before) {
      const bool goes_on = each->busy() || each->HoldsStages();
      if (step->plan().follows != 0 && !IsOther(*step, *each) && goes_on) continue;
      each->Stop(Replaced(*step));
    }
    thread->LookAgain();
    return Message{EncodeBegun({.names = step->tie_names(),
                                .averager = step->averages() ? options_.averager->number() : 0}),
                   {}};
  }

  absl::StatusOr<Message> Tie(Request& request) {
    DG_ASSIGN_OR_RETURN(Ties ties, DecodeTies(request.message.payload));
    std::shared_ptr<RankStep> step;
    {
      absl::MutexLock lock(&mu_);
      DG_ASSIGN_OR_RETURN(step, Find(ties.to));
    }
    DG_RETURN_IF_ERROR(step->Tie(std::move(ties)));
    return Message{};
  }

  Future<Message> Run(Request& request) {
    const absl::StatusOr<StepRef> ref = DecodeStepRef(request.message.payload);
    if (!ref.ok()) return Future<Message>::Of(ref.status());
    std::shared_ptr<RankStep> step;
    Future<Message> future;
    // Outside the lock, for which messages wait.
    const Neighbours neighbours = FindNeighbours();
    {
      absl::MutexLock lock(&mu_);
      const absl::StatusOr<std::shared_ptr<RankStep>> found = Find(*ref);
      if (!found.ok()) return Future<Message>::Of(found.status());
      step = *found;
      RankThread& thread = *ranks_[ref->first_stage].thread;
      // One that has started and has no thread would never end, nor would those behind it.
      RankThread::Steps steps;
      steps.emplace_back(step, ThreadsOf(*step, neighbours));
      const absl::StatusOr<Future<Message>> started = step->Start(request);
      if (!started.ok()) return Future<Message>::Of(started.status());
      thread.Run(std::move(steps));
      future = *started;
    }
    request.cancellation->OnCancel(
        [weak = std::weak_ptr<RankStep>(step), cancellation = request.cancellation.get()] {
          if (const auto alive = weak.lock()) alive->Stop(cancellation->why());
        });
    return future;
  }

  absl::StatusOr<Message> Deliver(Request& request) {
    DG_ASSIGN_OR_RETURN(const Parcel parcel, DecodeParcel(request.message.payload));
    // Under the lock, so that no step ends here, on the thread that reads messages.
    absl::MutexLock lock(&mu_);
    // One that has failed says why, also where the next one has begun.
    const std::shared_ptr<RankStep> step = FindKept(parcel.to);
    if (step == nullptr) return Find(parcel.to).status();
    DG_RETURN_IF_ERROR(step->Deliver(parcel, request.message.tensors));
    return Message{};
  }

  absl::StatusOr<Message> Describe(Request& request) {
    DG_ASSIGN_OR_RETURN(const StepRef ref, DecodeStepRef(request.message.payload));
    std::shared_ptr<RankStep> step;
    {
      absl::MutexLock lock(&mu_);
      step = FindKept(ref);
      if (step == nullptr) return Find(ref).status();
    }
    return Message{step->Describe(), {}};
  }

  Future<Message> End(Request& request) {
    const absl::StatusOr<StepEnd> end = DecodeEnd(request.message.payload);
    if (!end.ok()) return Future<Message>::Of(end.status());
    const StepRef& ref = end->of;
    const absl::Status why =
        absl::AbortedError("the step has failed on another rank, or for its driver");
    std::shared_ptr<RankStep> step;
    RankThread* thread = nullptr;
    absl::Status unknown;
    {
      absl::MutexLock lock(&mu_);
      // Its function may run after the stages were taken off, or another step has begun.
      if (const auto found = ranks_.find(ref.first_stage); found != ranks_.end()) {
        thread = found->second.thread.get();
      }
      step = FindKept(ref);
      if (step == nullptr) unknown = Find(ref).status();
    }
    if (step != nullptr) {
      Future<Message> ended = step->End(why);
      thread->LookAgain();
      return ended;
    }
    // One that was begun here, and forgotten (kMostStepsInFlight), may have averaged; so may one of
    // stages that were here before, with the same averager.
    if (options_.averager != nullptr && end->averager == options_.averager->number()) {
      FailAverages(*options_.averager, name_, *worker_, why);
    }
    return Future<Message>::Of(unknown);
  }

  // Has the name, which its end gives back from now on.
  void Claimed() {
    absl::MutexLock lock(&unregister_mu_);
    unregistered_ = false;
  }

  // Harmless to do twice, also where there was no memory for all of it.
  bool Close(Deadline deadline) {
    std::vector<std::shared_ptr<RankStep>> steps;  // to which no others come once it is closed
    std::vector<RankThread*> threads;              // which last as long as this
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      for (auto& [first_stage, rank] : ranks_) {
        const std::vector<std::shared_ptr<RankStep>> all = rank.AllSteps();
        steps.insert(steps.end(), all.begin(), all.end());
        if (rank.thread != nullptr) threads.push_back(rank.thread.get());
      }
    }
    // The worker may be gone by now: another Close() has stopped them, too, and has returned true.
    for (const std::shared_ptr<RankStep>& step : steps) step->Stop(Closed());
    for (RankThread* thread : threads) thread->Close();
    bool idle = true;
    for (RankThread* thread : threads) idle = thread->AwaitIdle(deadline) && idle;
    // Not before, for until then calls that come hear that the stages were taken off. The worker
    // may be gone when one Close() has returned true, so that another one waits here.
    absl::MutexLock lock(&unregister_mu_);
    if (!std::exchange(unregistered_, true)) {
      for (const std::string& function : functions_) worker_->UnregisterOwn(function);
    }
    return idle;
  }

 private:
  struct Rank {
    std::shared_ptr<RankStep> step;  // the last one that was begun
    // Those before it of which a function may still run, or that it comes behind.
    std::vector<std::shared_ptr<RankStep>> earlier;
    // Others before it, which have ended: their drivers may ask yet what they have stepped, and say
    // that they have failed.
    std::deque<std::shared_ptr<RankStep>> over;
    std::unique_ptr<RankThread> thread;

    std::vector<std::shared_ptr<RankStep>> AllSteps() const {
      std::vector<std::shared_ptr<RankStep>> all = earlier;
      if (step != nullptr) all.push_back(step);
      return all;
    }
  };

  // Ends the steps that nobody will start. Those that were started behind them end, too, on their
  // threads, and keep their stages from no other partition.
  void StopAbandoned() {
    std::vector<std::shared_ptr<RankStep>> all;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& [first_stage, rank] : ranks_) {
        for (std::shared_ptr<RankStep>& step : rank.AllSteps()) all.push_back(std::move(step));
      }
    }
    bool any = false;
    for (const std::shared_ptr<RankStep>& step : all) any = step->StopIfAbandoned() || any;
    if (!any) return;
    absl::MutexLock lock(&mu_);
    for (const auto& [first_stage, rank] : ranks_) {
      if (rank.thread != nullptr) rank.thread->LookAgain();
    }
  }

  std::vector<std::shared_ptr<RankStep>> StepsThatShareStagesWith(const RankStep& next) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    std::vector<std::shared_ptr<RankStep>> steps;
    for (const auto& [first_stage, rank] : ranks_) {
      for (const std::shared_ptr<RankStep>& step : rank.AllSteps()) {
        if (step->SharesStagesWith(next)) steps.push_back(step);
      }
    }
    return steps;
  }

  // The step of this rank behind which another one is to come, whether it runs or has ended.
  absl::StatusOr<std::shared_ptr<RankStep>> FindToFollow(const StepPlan& plan) const {
    absl::MutexLock lock(&mu_);
    if (closed_) return Closed();
    std::shared_ptr<RankStep> step =
        FindKept({plan.follows, FirstStage(plan.rank_of_stage, plan.rank)});
    if (step != nullptr) return step;
    return absl::FailedPreconditionError(
        absl::StrCat("worker '", worker_->name(), "' does not know the step of pipeline '", name_,
                     "' behind which this one is to come: the worker, or its stages, are new ones, "
                     "or more than ",
                     kMostStepsInFlight, " other steps have ended there since"));
  }

  // Whether the two are steps of different Pipelines.
  static bool IsOther(const RankStep& a, const RankStep& b) {
    return a.driver() != b.driver() || a.plan().pipeline != b.plan().pipeline;
  }

  // A stage runs one step at a time, and is its driver's from the step's beginning to its end. The
  // next step of the same Pipeline ends the one before, unless it comes behind it; its functions
  // come after those on the thread of the rank.
  absl::Status CheckMayBegin(const RankStep& next,
                             const std::vector<std::shared_ptr<RankStep>>& before) const {
    for (const std::shared_ptr<RankStep>& step : before) {
      const bool has_same = step->HasSameStagesAs(next);
      const bool conflicts =
          (IsOther(*step, next) && step->HoldsStages()) || (!has_same && step->busy());
      if (!conflicts) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("a step that worker ", worker_->Describe(step->driver()), " has begun",
                       has_same ? "" : ", with stages in other ranks,", " runs on worker '",
                       worker_->name(), "'; a stage runs one step at a time"));
    }
    return absl::OkStatus();
  }

  // The end of a step whose stages have another one.
  absl::Status Replaced(const RankStep& by) const {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", worker_->Describe(by.driver()), " has begun another step of pipeline '", name_,
        "' on worker '", worker_->name(), "' since: a stage runs one step at a time"));
  }

  // The workers on this machine, this one among them: how many the launcher says there are, or
  // else, where that is 0, those whose addresses say it.
  struct Neighbours {
    int launched = 0;
    std::vector<Member> members = {};
  };
  Neighbours FindNeighbours() const {
    if (options_.num_threads > 0) return {};
    if (const int launched = worker_->local_world_size(); launched > 0) return {launched, {}};
    return {0, worker_->MembersOnThisMachine()};
  }

  int ThreadsOf(const RankStep& step, const Neighbours& neighbours) const {
    if (options_.num_threads > 0) return options_.num_threads;
    const std::vector<std::string>& workers = step.plan().workers;
    // One that only drives the step waits for it meanwhile. All others may compute: the pipelines
    // of replicas do so at the same time, and are not in this plan.
    const auto computes = [&](const Member& member) {
      return member.rank != step.driver() ||
             std::count(workers.begin(), workers.end(), member.name) > 0;
    };
    const bool is_launched = neighbours.launched > 0;
    const int here = is_launched
                         ? neighbours.launched
                         : static_cast<int>(std::count_if(neighbours.members.begin(),
                                                          neighbours.members.end(), computes));
    const auto own = std::count(workers.begin(), workers.end(), worker_->name());
    const int ranks = std::max(here, 1) * std::max(static_cast<int>(own), 1);
    return is_launched || ranks > 1 ? std::max(1, std::min(threads_, processors_ / ranks))
                                    : threads_;
  }

  absl::Status Closed() const {
    return absl::CancelledError(absl::StrCat("the stages of pipeline '", name_, "' on worker '",
                                             worker_name_, "' were taken off"));
  }
  // A step of a rank, whether it runs or has ended; null where it is not known any more.
  std::shared_ptr<RankStep> FindKept(const StepRef& ref) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const auto rank = ranks_.find(ref.first_stage);
    if (rank == ranks_.end()) return nullptr;
    for (const std::shared_ptr<RankStep>& step : rank->second.AllSteps()) {
      if (step->plan().step == ref.step) return step;
    }
    for (const std::shared_ptr<RankStep>& step : rank->second.over) {
      if (step->plan().step == ref.step) return step;
    }
    return nullptr;
  }
  // One that is not over.
  absl::StatusOr<std::shared_ptr<RankStep>> Find(const StepRef& ref) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    if (closed_) return Closed();
    const auto found = ranks_.find(ref.first_stage);
    if (found == ranks_.end() || found->second.step == nullptr) {
      return absl::NotFoundError(absl::StrCat("worker '", worker_->name(),
                                              "' has no such step of pipeline '", name_,
                                              "': the worker, or its stages, are new ones"));
    }
    // Behind one that runs others may have begun.
    for (const std::shared_ptr<RankStep>& step : found->second.AllSteps()) {
      if (step->plan().step == ref.step) return step;
    }
    return Replaced(*found->second.step);
  }

  Worker* const worker_;
  const std::string worker_name_;  // also when the worker is gone
  const std::string name_;
  const std::map<int, PipelineStage> stages_;
  const PipelineStagesOptions options_;
  const int threads_ = at::get_num_threads();  // of whoever makes it
  const int processors_ = UsableProcessors();  // as of then: finding out reads files

  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  // By their first stages. Once closed_ is set there come no others.
  std::map<int, Rank> ranks_ ABSL_GUARDED_BY(mu_);

  // What claims the name is the last that goes.
  const std::array<std::string, 6> functions_{
      absl::StrCat(kDeliver, name_), absl::StrCat(kRunStep, name_),
      absl::StrCat(kTieStep, name_), absl::StrCat(kDescribe, name_),
      absl::StrCat(kEndStep, name_), absl::StrCat(kBeginStep, name_)};

  absl::Mutex unregister_mu_;
  bool unregistered_ ABSL_GUARDED_BY(unregister_mu_) = true;
};

absl::StatusOr<std::unique_ptr<PipelineStages>> PipelineStages::Create(
    Worker* worker, std::string name, std::map<int, PipelineStage> stages,
    PipelineStagesOptions options) {
  if (name.size() > kMaxPipelineName || absl::StrContains(name, "::")) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker '", worker->name(), "' cannot have stages of a pipeline '", name,
                     "': a name has at most ", kMaxPipelineName, " bytes, and no '::'"));
  }
  for (const auto& [number, stage] : stages) {
    if (number >= 0 && stage.forward != nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat("stage ", number, " of pipeline '", name,
                                                   "' has a number below 0 or no forward"));
  }
  std::map<const c10::TensorImpl*, std::string> names;  // of tied parameters
  for (const auto& [number, stage] : stages) {
    for (const auto& [tied, parameter] : stage.tied) {
      const bool is_good =
          tied.size() <= kMaxPipelineName && parameter.defined() && parameter.is_leaf() &&
          parameter.requires_grad() &&
          names.emplace(parameter.unsafeGetTensorImpl(), tied).first->second == tied;
      if (is_good) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "the tied parameter '", tied.substr(0, kMaxPipelineName), "' of stage ", number,
          " of pipeline '", name, "' is not a leaf that requires grad, has another name, too, or ",
          "one of more than ", kMaxPipelineName,
          " bytes (PipelineStage::tied; in C tied of dg_pipeline_stage)"));
    }
  }
  if (options.num_threads < 0) {
    return absl::InvalidArgumentError(absl::StrCat("the stages of pipeline '", name,
                                                   "' cannot use ", options.num_threads,
                                                   " threads (PipelineStagesOptions::num_threads; "
                                                   "in C dg_pipeline_stages_options.num_threads)"));
  }
  const auto impl = std::make_shared<Impl>(worker, name, std::move(stages), options);
  // Its end takes off what is registered by then.
  std::unique_ptr<PipelineStages> made(new PipelineStages(impl));
  // Who comes first here has the name.
  const absl::Status claimed = worker->RegisterOwn(
      absl::StrCat(kBeginStep, name), [impl](Request& request) { return impl->Begin(request); });
  if (absl::IsAlreadyExists(claimed)) {
    return absl::AlreadyExistsError(absl::StrCat(
        "worker '", worker->name(), "' has stages of a pipeline '", name, "' already"));
  }
  DG_RETURN_IF_ERROR(claimed);
  impl->Claimed();
  DG_RETURN_IF_ERROR(worker->RegisterOwnInline(
      absl::StrCat(kDeliver, name), [impl](Request& request) { return impl->Deliver(request); }));
  DG_RETURN_IF_ERROR(worker->RegisterOwn(absl::StrCat(kTieStep, name),
                                         [impl](Request& request) { return impl->Tie(request); }));
  DG_RETURN_IF_ERROR(worker->RegisterOwn(
      absl::StrCat(kDescribe, name), [impl](Request& request) { return impl->Describe(request); }));
  DG_RETURN_IF_ERROR(worker->RegisterOwnAsync(
      absl::StrCat(kRunStep, name), [impl](Request& request) { return impl->Run(request); }));
  DG_RETURN_IF_ERROR(worker->RegisterOwnAsync(
      absl::StrCat(kEndStep, name), [impl](Request& request) { return impl->End(request); }));
  return made;
}

bool PipelineStages::Close(Deadline deadline) {
  // A destructor calls it, and nobody would take the stages off after it.
  return AwaitMemory([&] { return impl_->Close(deadline); });
}

PipelineStages::~PipelineStages() { Close(Deadline::Never()); }

}  // namespace distgrad
