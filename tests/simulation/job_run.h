// A job that runs: what its actions share. Each kind of action has a file of its own.
#ifndef DISTGRAD_TESTS_SIMULATION_JOB_RUN_H_
#define DISTGRAD_TESTS_SIMULATION_JOB_RUN_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/deadline.h"
#include "core/base/ids.h"
#include "core/membership/member_event.h"
#include "core/pipeline/pipeline.h"
#include "core/pipeline/stages.h"
#include "core/worker/optimizer.h"
#include "core/worker/worker.h"
#include "tests/integration/property_frame.h"
#include "tests/simulation/group.h"
#include "tests/simulation/network.h"
#include "tests/simulation/plan.h"
#include "tests/simulation/store.h"

namespace distgrad::simulation {

// Longer than anything that is disturbed takes to be noticed.
inline constexpr absl::Duration kTimeout = absl::Minutes(1);
inline constexpr absl::Duration kHeartbeatLimit = absl::Seconds(4);
inline constexpr int kMostRanks = 6;  // of a process group
inline constexpr int kLauncher = -1;  // the number of its process

void Must(const absl::Status& status);
at::Tensor Constant(double value);
// What a worker does to a value on its way.
at::Tensor Forward(const at::Tensor& x, const at::Tensor& parameter);

// A pipeline that some action runs: the same on all workers, but for the stages that they have.
struct PipelineModel;

// What a callback for members has heard last of each, and when.
using Heard = std::map<WorkerRank, std::pair<MemberEvent, Deadline::Clock::time_point>>;

// A process, as far as there is one. What comes later needs what comes before it.
struct Process {
  int number = 0;               // of InProcess
  Incarnation incarnation = 0;  // of its worker, which may know of a later one
  std::shared_ptr<SimulatedHost> host;
  std::shared_ptr<StoreOfProcess> store;
  std::shared_ptr<Heard> heard;  // with a callback for members; *heard is guarded by Job::mu_
  bool is_first = false;         // it has been there from the start
  std::atomic<bool> is_dead{false};
  std::atomic<bool> is_over{false};  // its worker has been started elsewhere
  Tensors weights;  // that are trained, also by a handler that the worker's end finds
  std::shared_ptr<Worker> worker;
  std::weak_ptr<const void> timers;  // counts those of the worker's clock, and the clock
  std::unique_ptr<Optimizer> optimizer;
  std::vector<std::unique_ptr<PipelineStages>> stages;
};

class Job {
 public:
  explicit Job(const Plan& plan);
  ~Job();

  std::string Run();

 private:
  // What came of an optimizer's step.
  struct Training {
    enum Taken { kNowhere, kPerhaps, kEverywhere } taken = kNowhere;
    std::map<std::pair<int, int>, int> counts;  // of passes, by worker and weight
  };
  // One rank of a group: averages.cc.
  class Rank;

  // An action, or a part of one, and which faults may explain that it fails: those that have met
  // two of its workers since it began.
  struct Doing {
    std::string what;
    const Process* process;  // whose it is
    std::set<int> workers;   // that take part
    Deadline::Clock::time_point since = Deadline::Clock::now();

    Doing Part(absl::string_view part) const {
      return {absl::StrCat(what, ", ", part), process, workers, since};
    }
    Doing With(std::set<int> others) const {
      others.insert(workers.begin(), workers.end());
      return {what, process, std::move(others), since};
    }
  };

  // What a fault makes fail: between two workers, between one and all others, with one alone, or
  // everywhere. And that one who joins and leaves is not there: no fault, and it explains only what
  // names it.
  struct Disturbance {
    enum Kind : unsigned {
      kNetwork = 1,
      kStore = 2,
      kThreads = 4,
      kDeath = 8,
      kFault = 15,
      kAbsence = 16
    };
    static constexpr int kAll = -1;
    Kind kind;
    Deadline until;  // then it is over, and so is what it has led to
    int a = kAll, b = kAll;
    std::string name = {};  // of who is absent
  };

  void Wrong(const std::string& what);
  std::string wrong();

  // Guests have the numbers behind those of the workers.
  std::string NameOf(int i) const;
  bool IsGuest(int i) const { return i >= plan_.workers; }
  std::shared_ptr<Process> ProcessAt(int i);  // null: dead
  std::shared_ptr<Worker> WorkerAt(int i);
  std::string AddressOf(int i);
  // A thread of the job's own, which Run() joins.
  void Spawn(absl::AnyInvocable<void()> fn);
  void JoinSpawned();

  absl::StatusOr<std::shared_ptr<Process>> NewProcess(int i, const std::string& name, bool joins);
  absl::Status StartWorker(int i, bool is_first);
  void RegisterAll(Process* process, int i);
  void KillWorker(int i, bool silently);
  void EndProcess(Process* process, bool silently);
  void ComeBack(const Action& action);
  // Starts a worker again, after its death among the disturbances, and checks how that ends.
  absl::Status StartAgain(const Action& action, absl::string_view how, size_t death);
  void StopWorker(const Action& action);
  void StartElsewhere(const Action& action, const std::shared_ptr<Process>& old, Deadline resumed);
  // Checks that one whose worker has been started elsewhere learns that, and has no say any more.
  void CheckIsOver(int i, Process* old);
  void RunGuest(const Action& action);
  void EndGuest(const std::string& what, int i, Process* guest);
  // Returns which of the disturbances it is, for EndAbsence(): from now on it may be called.
  size_t BeginAbsence(const std::string& name);
  void EndAbsence(size_t absence);

  // members.cc
  void RunWatch(Process* process);
  void Hear(const std::string& who, Heard* heard, const MemberEvent& event);
  // From then on nobody hears that it has joined; in the end nobody believes that it has, whenever.
  void NoteDeath(const Process& process, Deadline when = Deadline::After(absl::ZeroDuration()));
  // Checks that nobody who has a callback for members has heard last of a dead one that it joined.
  void CheckHeard();

  void Act(const Action& action);
  void Disturb(const Action& action);
  void ActWithAll(int i);

  // calls.cc
  void RegisterCalls(Worker* worker, int i);
  void RunProgram(const Action& action, Process* process);
  void RunCall(const Action& action, Process* process);
  void RunPass(const Action& action, Process* process);
  void RunBurst(const Action& action, Process* process);
  void RunLook(const Action& action, Process* process);
  void RunCrowd(const Action& action, Process* process);
  void RunAwait(const Action& action, Process* process);

  // training.cc
  void RegisterTraining(Process* process);
  void RunTrain(const Action& action, Process* process);
  void CheckTrained();
  void RegisterPipelines(Process* process, int i);
  void RunPipeline(const Action& action, Process* process);
  void RunRivals(const Action& action);
  void CheckStagesAreFree();
  // `context`: null where it has no gradients.
  void CheckPipeline(const Action& action, const Doing& doing, const Context* context,
                     const absl::StatusOr<PipelineResult>& result, Deadline deadline);

  // averages.cc
  // Whether one of the ranks of a group has ever been killed.
  bool LacksOne(int size);
  void RegisterAverages(const Process& process, int i);
  void RunAverages(const Action& action, int i, Process* process);
  void RunBarrier(const Action& action, int i, Process* process);
  // Whether all workers that an error names as late do not come to the barrier any more, or not in
  // time, for a reason.
  bool ExplainsLate(int barrier, absl::string_view message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // What all workers take part in, and whoever joins.
  Doing DoingOfAll(const std::string& what, const Process* process) const;
  void AddDisturbance(Disturbance disturbance);
  // Whether one of such a kind has met what is done.
  bool IsDisturbed(const Doing& doing, unsigned kinds = Disturbance::kFault);
  // Whether a message names somebody who joins and leaves, and was not there all the time.
  bool NamesAbsent(const Doing& doing, absl::string_view message);
  bool HasFaults(unsigned kinds = Disturbance::kFault);
  // Whether anybody may have taken a member for lost since then.
  bool MayBeTakenForLost(int rank, Deadline::Clock::time_point since = {});

  // The ways in which something may end, besides by a fault.
  struct Terms {
    int ending = Action::kByItself;
    bool planned = false;   // another worker gives up
    bool anywhere = false;  // it is noted where it fails, also on a worker that was killed
  };
  // Checks how something ended that was to be over by then.
  void CheckEnd(const Doing& doing, const absl::Status& status, Deadline deadline, Terms terms);
  void CheckEnd(const Doing& doing, const absl::Status& status, Deadline deadline,
                int ending = Action::kByItself) {
    CheckEnd(doing, status, deadline, Terms{ending});
  }
  // Returns why a fault, who is absent, or a plan does not explain this error; "" if one does.
  std::string Unexplained(const Doing& doing, const absl::Status& status, Terms terms);
  void CheckNothingIsLeft();
  void CheckTimers();
  void CheckStore();
  // Whether the plan and the faults explain that the store has this key at the end.
  bool ExplainsKey(absl::string_view key) ABSL_LOCKS_EXCLUDED(mu_);
  bool ExplainsKeyOfGroup(absl::Span<const absl::string_view> words) const;
  // Checks that live workers reach each other again.
  void CheckAllIsWell();

  const Plan& plan_;
  const std::shared_ptr<SimulatedNetwork> network_;
  const std::shared_ptr<KeysEverSet> keys_;
  std::unique_ptr<TcpStore> store_;  // of the launcher, which serves it
  GroupNetwork groups_;
  std::vector<Tensors> parameters_;                          // by worker
  std::map<int, std::unique_ptr<PipelineModel>> pipelines_;  // by Action::a
  // Whether a worker was killed, or was killed in silence.
  std::atomic<bool> killed_{false}, killed_silently_{false};
  bool has_newcomers_ = false;

  absl::Mutex mu_;
  std::vector<std::shared_ptr<Process>> processes_ ABSL_GUARDED_BY(mu_);  // null: dead
  std::set<int> coming_back_ ABSL_GUARDED_BY(mu_);
  std::set<int> ever_killed_ ABSL_GUARDED_BY(mu_);  // or started elsewhere
  std::map<std::pair<WorkerRank, Incarnation>, Deadline::Clock::time_point> died_
      ABSL_GUARDED_BY(mu_);
  std::string wrong_ ABSL_GUARDED_BY(mu_);
  std::vector<Disturbance> disturbances_ ABSL_GUARDED_BY(mu_);
  std::map<int, size_t> deaths_ ABSL_GUARDED_BY(mu_);    // which of those is each worker's last one
  std::map<int, size_t> absences_ ABSL_GUARDED_BY(mu_);  // and each guest's first one
  std::set<std::string> members_ ABSL_GUARDED_BY(mu_);   // all that have ever joined, or tried to
  // The runs of programs, to the end: a call may outlive its deadline.
  std::vector<std::unique_ptr<std::pair<Steps, State>>> runs_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> spawned_ ABSL_GUARDED_BY(mu_);
  int newcomers_ ABSL_GUARDED_BY(mu_) = 0, numbers_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, Training> trained_ ABSL_GUARDED_BY(mu_);  // by Action::b
  // One worker's barriers, that it has come to and passed. One that has failed it comes to again,
  // so that it comes to fewer of them; as it does if it is long in a group of which one is gone.
  struct Barriers {
    int come = 0, passed = 0;
    bool has_failed = false, averages = false;
  };
  std::vector<Barriers> barriers_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<Rank>> ranks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_JOB_RUN_H_
