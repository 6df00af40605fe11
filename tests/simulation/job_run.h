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
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
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
  std::shared_ptr<SimulatedHost> host;
  std::shared_ptr<SimulatedStore> store;
  std::shared_ptr<Heard> heard;  // with a callback for members; *heard is guarded by Job::mu_
  bool is_first = false;         // it has been there from the start
  Tensors weights;               // that are trained, also by a handler that the worker's end finds
  std::shared_ptr<Worker> worker;
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
  void ComeBack(const Action& action);
  void RunGuest(const Action& action);
  void EndGuest(const std::string& what, Process* guest);

  // members.cc
  void RunWatch(Process* process);
  void Hear(const std::string& who, Heard* heard, const MemberEvent& event);
  void NoteDeath(const Process& process);
  // Checks that nobody who has a callback for members has heard last of a dead one that it joined.
  void CheckHeard();

  void Act(const Action& action);
  void Disturb(const Action& action);
  void ActWithAll(int i);

  // calls.cc
  void RegisterCalls(Worker* worker, int i);
  void RunProgram(const Action& action, Worker* worker);
  void RunCall(const Action& action, Worker* worker);
  void RunPass(const Action& action, Worker* worker);
  void RunBurst(const Action& action, Worker* worker);
  void RunLook(const Action& action, Worker* worker);
  void RunCrowd(const Action& action, Worker* worker);
  void RunAwait(const Action& action, Worker* worker);

  // training.cc
  void RegisterTraining(Process* process);
  void RunTrain(const Action& action, Process* process);
  void CheckTrained();
  void RegisterPipelines(Process* process, int i);
  void RunPipeline(const Action& action, Worker* worker);
  void RunRivals(const Action& action);
  void CheckStagesAreFree();
  // `context`: null where it has no gradients.
  void CheckPipeline(const Action& action, Worker* worker, const Context* context,
                     const absl::StatusOr<PipelineResult>& result, Deadline deadline);

  // averages.cc
  void RegisterAverages(Worker* worker, int i);
  void RunAverages(const Action& action, int i, Process* process);
  void RunBarrier(const Action& action, int i, Worker* worker);

  // The ways in which something may end, besides by a fault.
  struct Terms {
    int ending = Action::kByItself;
    bool with_guests = false;  // which may not be there yet, or not any more
    bool planned = false;      // another worker gives up
  };
  // Checks how something ended that was to be over by then.
  void CheckEnd(const std::string& what, const absl::Status& status, Deadline deadline,
                Terms terms);
  void CheckEnd(const std::string& what, const absl::Status& status, Deadline deadline,
                int ending = Action::kByItself) {
    CheckEnd(what, status, deadline, Terms{ending});
  }
  void CheckNothingIsLeft();
  void CheckStore();
  // Checks that live workers reach each other again.
  void CheckAllIsWell();

  const Plan& plan_;
  const std::shared_ptr<SimulatedNetwork> network_;
  const std::shared_ptr<StoreWeather> weather_;
  const std::shared_ptr<Store> store_;
  GroupNetwork groups_;
  std::vector<Tensors> parameters_;                          // by worker
  std::map<int, std::unique_ptr<PipelineModel>> pipelines_;  // by Action::a
  // Whether something may fail that must not otherwise; a worker was killed or came back, or was
  // killed in silence; threads were refused; a worker joins meanwhile.
  std::atomic<bool> disturbed_{false}, killed_{false}, killed_silently_{false}, refused_{false};
  bool has_newcomers_ = false;

  absl::Mutex mu_;
  std::vector<std::shared_ptr<Process>> processes_ ABSL_GUARDED_BY(mu_);  // null: dead
  std::set<int> coming_back_ ABSL_GUARDED_BY(mu_);
  std::set<int> ever_killed_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<WorkerRank, Incarnation>, Deadline::Clock::time_point> died_
      ABSL_GUARDED_BY(mu_);
  std::string wrong_ ABSL_GUARDED_BY(mu_);
  // The runs of programs, to the end: a call may outlive its deadline.
  std::vector<std::unique_ptr<std::pair<Steps, State>>> runs_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> spawned_ ABSL_GUARDED_BY(mu_);
  int newcomers_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int, Training> trained_ ABSL_GUARDED_BY(mu_);  // by Action::b
  // One worker's barriers, that it has come to and passed.
  struct Barriers {
    int come = 0, passed = 0;
  };
  std::vector<Barriers> barriers_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<Rank>> ranks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad::simulation

#endif  // DISTGRAD_TESTS_SIMULATION_JOB_RUN_H_
