// The members of a job, by way of its store: how workers find each other when it starts, and how
// they come and go while it runs. docs/membership.md has the rules.
//
//   Membership members(store, {.name = "back", .rank = 1, .world_size = 2});
//   WorkerInfo self = *members.Claim(deadline);         // a rank, and an incarnation of it
//   self.address = ...;                                 // listens
//   std::vector<WorkerInfo> all = *members.Enter(self, deadline);
#ifndef DISTGRAD_CORE_MEMBERSHIP_MEMBERSHIP_H_
#define DISTGRAD_CORE_MEMBERSHIP_MEMBERSHIP_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/membership/member_event.h"
#include "core/membership/store.h"
#include "core/membership/worker_info.h"

namespace distgrad {

// What a worker asks for when it joins.
struct MembershipOptions {
  // "": "worker<rank>". Who joins without one gets the next rank whose name is free.
  std::string name = {};
  int rank = 0;        // in the job's start
  int world_size = 1;  // of the job's start
  // Whether it comes to a job that has started, under a name of its own: the store gives the rank,
  // and neither `rank` nor `world_size` is read.
  bool join = false;
  // The number of workers that may ever join the job. A worker neither joins as one more nor knows
  // of more.
  int max_workers = 4096;
  // The time that the store may be silent while a thread waits for the other workers, by way of it.
  absl::Duration store_limit = absl::InfiniteDuration();
};

// Blocks in the store, but for MarkLost, MarkAlive and Close: never on a pool's or a transport's
// thread. Claim and then Enter come first, once each; thread-safe after that. What has a deadline
// waits for a store that is silent until then, and always some seconds; after Enter for no longer
// than `store_limit`, which is kUnavailable, and not when this is closed, which is kCancelled.
//
// As long as no worker is late, lost or leaves, each asks the store a fixed number of times to
// enter, in each barrier and at the end, whatever the size of the job.
class Membership {
 public:
  Membership(std::shared_ptr<Store> store, MembershipOptions options)
      : store_(std::move(store)), options_(std::move(options)) {}
  ~Membership() { Close(); }

  // Claims rank, name and incarnation of this worker. A rank that is claimed already is claimed
  // again, by a new incarnation, if its worker had that name and the job has started.
  //
  // kInvalidArgument for options that make no sense; kAlreadyExists, on every worker, when two
  // claim one rank before the job has started, and for a name that is taken or, for one that joins,
  // of no use any more; kResourceExhausted beyond `max_workers`; kDeadlineExceeded if the job that
  // is to be joined has not started.
  absl::StatusOr<WorkerInfo> Claim(Deadline deadline);

  // Publishes `self`, which is what Claim() gave with an address. At the job's start this waits
  // for all its workers. Returns the members, this one among them, by rank.
  //
  // kDeadlineExceeded names the ranks that did not come; kAlreadyExists, on every worker, when
  // two have one name; kInvalidArgument for an address or devices that no entry has room for.
  absl::StatusOr<std::vector<WorkerInfo>> Enter(const WorkerInfo& self, Deadline deadline);

  // Return a worker as the store has it now, whether it has left or not. kNotFound if it was never
  // a member.
  absl::StatusOr<WorkerInfo> Find(WorkerRank rank, Deadline deadline);
  absl::StatusOr<WorkerInfo> Find(absl::string_view name, Deadline deadline);

  // Finds several at once, with an answer for each.
  using Who = std::variant<WorkerRank, std::string>;
  std::vector<absl::StatusOr<WorkerInfo>> FindEach(absl::Span<const Who> workers,
                                                   Deadline deadline);

  // Has `read` called with the members whenever a thread that waits for all has read them, and with
  // those of them whose loss has been taken back: on that thread, which may block. Called once,
  // before any thread waits.
  using Read = std::function<void(const std::vector<WorkerInfo>& members,
                                  const std::vector<WorkerInfo>& denied)>;
  void OnRead(Read read) { read_ = std::move(read); }

  // Return the members that have not left, by rank; and all that ever were.
  absl::StatusOr<std::vector<WorkerInfo>> All(Deadline deadline);
  absl::StatusOr<std::vector<WorkerInfo>> AllEver(Deadline deadline);
  // Returns how often each of these was started, by its counter, which nobody signs: where it is no
  // number, the greatest one that tells contexts apart. One exchange with the store for each.
  absl::StatusOr<std::vector<int64_t>> StartsOf(absl::Span<const WorkerInfo> workers,
                                                Deadline deadline);

  // Returns whether this worker came when the job had started.
  bool late() const { return late_; }

  // Says that this worker leaves. kFailedPrecondition, as in a barrier and at the end, for one
  // whose worker has come back as a later incarnation: it may have been stopped meanwhile.
  absl::Status Leave(Deadline deadline);

  // Says that this incarnation of a member is lost, and why: all workers that wait for it in a
  // barrier, and those that will, hear of it within about a second, by way of the store. Returns at
  // once; for any thread. Should the member live after all, it takes the word back at its next
  // barrier, or in the one that it waits in; a new incarnation of it is not lost. Returns false if
  // there is no thread to be had that would say it: then it is not said.
  bool MarkLost(const WorkerInfo& member, std::string reason = "");
  // Takes back that word, or has it not said if it is on its way; what another worker has said
  // stays. The same.
  void MarkAlive(WorkerRank member, Incarnation incarnation);
  // Takes back that this worker is lost, as another one said; returns whether one had, or another
  // denial may not have been heard (yet). A store that is silent has some seconds; kCancelled once
  // this is closed.
  absl::StatusOr<bool> DenyLoss();

  struct LostMember {
    WorkerInfo worker;
    std::string reason;
  };
  // Returns another number whenever something has happened to members: joins, returns, losses and
  // departures. A store that is silent has some seconds, also below.
  absl::StatusOr<int64_t> Changes();
  // The members that are marked as lost, and those for which that was taken back.
  struct Losses {
    std::vector<LostMember> lost;
    std::vector<WorkerInfo> denied;
    // False if somebody has taken back that a member is lost whose loss, as MarkLost() was told,
    // the store may not have had yet: that may be an earlier one, so it is not in `denied`.
    bool are_all_said = true;
  };
  absl::StatusOr<Losses> LossesOf(const std::vector<WorkerInfo>& members);

  // Waits until every member has called it as often as this one. A member that leaves meanwhile is
  // not waited for, nor is one that joined or came back after this barrier had begun. When all have
  // come each calls `finish`, whose error is one of the barrier. kDeadlineExceeded names the
  // workers that did not come, kUnavailable those that are lost. After one that fails the next call
  // continues it, and waits for the same members. Calls at the same time are one.
  absl::Status Barrier(
      Deadline deadline, OnLost on_lost = OnLost::kFail,
      absl::FunctionRef<absl::Status()> finish = [] { return absl::OkStatus(); });

  // Waits like a barrier, once, before all end. When all have come each calls `finish`, and when
  // that has returned everywhere this worker has left, and so will all others. Worker 0, which may
  // serve the store, goes last.
  absl::Status Shutdown(
      Deadline deadline, OnLost on_lost = OnLost::kFail,
      absl::FunctionRef<absl::Status()> finish = [] { return absl::OkStatus(); });
  // Returns whether all have finished: a member that is gone now has ended in good order.
  bool finished() const { return finished_; }

  // Ends barriers that wait here, and later ones, with kCancelled within a second, or some seconds
  // where the store is silent. Waits for nothing.
  void Close() { closed_ = true; }
  bool closed() const { return closed_; }

 private:
  absl::Status CheckOptions() const;
  absl::Status CheckOpen() const;
  // This worker's name, with that rank.
  std::string NameAt(int rank) const;
  absl::StatusOr<WorkerInfo> ClaimRank(Deadline deadline);
  absl::StatusOr<WorkerInfo> ClaimByName(Deadline deadline);
  // Returns a rank that nobody has had.
  absl::StatusOr<int> NextRank(Deadline deadline);
  // Returns the rank of a name; nullopt if nobody has said it.
  absl::StatusOr<std::optional<int>> RankOf(const std::string& name, Deadline deadline);
  // Claims a name, and says which rank it has: `rank`, if nobody has claimed it before. nullopt
  // where one of several others says so.
  absl::StatusOr<std::optional<int>> ClaimName(const std::string& name, int rank,
                                               Deadline deadline);
  // Says the rank of the first claim of a name, if by that count it is the only one; else nullopt.
  absl::StatusOr<std::optional<int>> SayFirst(const std::string& name, int64_t claims,
                                              Deadline deadline);
  // Claims a rank that this worker's name has. kAlreadyExists if it is that of another one.
  absl::StatusOr<WorkerInfo> ClaimIncarnation(int rank, Deadline deadline);
  absl::StatusOr<WorkerInfo> NextIncarnation(WorkerRank rank, int64_t count);
  absl::StatusOr<std::vector<WorkerInfo>> EnterAtStart(Deadline deadline);
  absl::StatusOr<std::vector<WorkerInfo>> EnterLate(Deadline deadline);
  absl::StatusOr<std::vector<WorkerInfo>> GatherEntries(Deadline deadline);
  absl::Status Publish(Deadline deadline);
  absl::Status PublishLeft(Deadline deadline);
  // Takes in this worker's entry, as the store has it: replaces that of an earlier incarnation,
  // which was slow, or went on when it was over, unless this one leaves. kFailedPrecondition if it
  // is of a later one.
  absl::Status CheckOwnEntry(const Store::Value& entry, Deadline deadline);
  // Replaces this worker's entry where an earlier incarnation has written its own.
  absl::Status PutEntryRight(Deadline deadline);
  // The entry of this worker when it has left.
  WorkerInfo Left() const;
  // Reads what the store has of a loss, and with it whether a later incarnation of this worker has
  // come, which changes nothing in the store.
  absl::StatusOr<Store::Value> ReadLoss(const std::string& key);
  // The error of an incarnation that is over.
  absl::Status Replaced() const;
  // Wakes all workers that wait in a barrier: the members are others now.
  absl::Status WakeBarriers(Deadline deadline);
  // Returns the number of ranks that there may be.
  absl::StatusOr<int> CountRanks(Deadline deadline);

  // A point at which all members wait: a barrier, the end, or what is behind it.
  struct BarrierSpec {
    std::string name;      // its keys begin with it
    std::string arrivals;  // and those of the entries which say who has come
    int64_t number;        // of the barrier; kLast
    OnLost on_lost;
  };
  // Members that have to come and have not.
  struct Absent {
    std::vector<WorkerInfo> late;
    std::vector<LostMember> lost;
    bool self = false;          // this worker itself is taken for lost
    bool mark_is_gone = false;  // what says that it has come is not there
  };
  // Returns the entry which says that a worker has come.
  static std::string MarkKey(const BarrierSpec& barrier, WorkerRank worker);
  absl::Status WriteMark(const BarrierSpec& barrier, Deadline deadline);
  static bool HasCome(const BarrierSpec& barrier, const WorkerInfo& worker,
                      const Store::Value& mark);
  // Says that this worker has come, and waits until all have.
  absl::Status WaitAtBarrier(const BarrierSpec& barrier, Deadline deadline);
  absl::StatusOr<Absent> FindAbsent(const BarrierSpec& barrier, Deadline deadline);
  // Has worker 0 wait until all others have left.
  absl::Status GoAfterAll(Deadline deadline);
  // Says that all have come.
  absl::Status Open(const BarrierSpec& barrier, Deadline deadline);
  // The value of kChanges when this worker last checked the members.
  Store::Value LastChanges();
  void SetLastChanges(const Store::Value& changes);
  // The loss of that incarnation of a member, if it is lost, and why; or that this was taken back.
  struct Loss {
    bool is_lost = false;
    bool is_denied = false;
    std::string reason = {};
  };
  static Loss LossOf(const WorkerInfo& member, const Store::Value& entry);
  // What MarkLost() has been told until now: the number of the last word, and unsaid_.
  struct Words {
    uint64_t last = 0;
    std::map<WorkerRank, int> unsaid = {};

    // Whether a member has taken back what it was told lost for. That an earlier loss was taken
    // back says nothing of a later one, which is on its way there.
    bool IsDenied(WorkerRank member, const Loss& loss) const {
      return loss.is_denied && unsaid.count(member) == 0;
    }
  };
  Words WordsSoFar();
  // Forgets a loss that was told by then, if it is over, as was read after that: the member has
  // left, has come back, or has taken it back.
  void Forget(const Words& words, const WorkerInfo& member, const Loss& loss);
  void Announce(const LostMember& lost);
  void TakeBack(WorkerRank member);
  // Writes `value`, unless what is there makes that unwanted, and wakes barriers. Returns whether
  // there is nothing left to do; waits while the store is silent or full.
  bool Say(const std::string& key, const std::string& value,
           absl::FunctionRef<bool(const Store::Value&)> is_wanted);
  // Returns whether that is what this worker has said of the loss of a member, and takes back.
  bool IsTakenBack(WorkerRank member, const Store::Value& entry) ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool DenialIsUnheard();
  // Asks again while the store is silent: until the deadline, the store's limit, or this worker
  // closes.
  template <typename Ask>
  auto Patiently(Deadline deadline, const Ask& ask) -> decltype(ask(deadline));
  // Adds to an error of the store the members that this worker knows to be lost: one of them may
  // have served it.
  absl::Status WithLost(const absl::Status& status);

  // Constant after construction.
  const std::shared_ptr<Store> store_;
  const MembershipOptions options_;

  // Constant after Enter().
  WorkerInfo self_;
  int world_size_ = 0;  // at the job's start
  bool late_ = false;   // the job had started before
  Read read_;           // may be null

  std::atomic<bool> closed_{false};
  std::atomic<bool> finished_{false};
  std::atomic<bool> is_over_{false};   // a later incarnation has come
  std::atomic<bool> has_left_{false};  // or is about to say so
  std::atomic<int64_t> barriers_{0};   // that are over
  std::atomic<int64_t> coming_{0};     // the last that this worker has been asked to come to
  std::atomic<int64_t> come_{0};       // the last that it has been counted at
  // The number of members, without the lost, at the last check; and whether one was lost.
  std::atomic<int> size_{0};
  std::atomic<bool> any_lost_{false};

  absl::Mutex mu_;
  // This member has denied that it is lost, may not have woken those who would read that, and no
  // thread is about to.
  bool denial_is_unheard_ ABSL_GUARDED_BY(mu_) = false;
  int denials_ ABSL_GUARDED_BY(mu_) = 0;  // on their way
  // As this worker was told, and by which word; and the number of the last one.
  struct Told {
    LostMember lost;
    uint64_t word = 0;
  };
  std::map<WorkerRank, Told> lost_ ABSL_GUARDED_BY(mu_);
  uint64_t last_word_ ABSL_GUARDED_BY(mu_) = 0;
  // What it has written of the losses of members, as far as it may be there yet.
  std::map<WorkerRank, std::string> said_ ABSL_GUARDED_BY(mu_);
  // How many words of MarkLost() for each are on their way to the store; not 0.
  std::map<WorkerRank, int> unsaid_ ABSL_GUARDED_BY(mu_);
  Store::Value changes_ ABSL_GUARDED_BY(mu_);

  ThreadPool announcer_{"dg-lost", 1};  // goes first
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_MEMBERSHIP_H_
