// Keeps what a worker knows of the members of its job in step with the store: it marks members that
// cannot be reached as lost, takes back what others say of this one, and reads which members have
// come and gone while a callback is set. docs/membership.md, "Lost members", has the rules.
#ifndef DISTGRAD_CORE_WORKER_MEMBER_SYNC_H_
#define DISTGRAD_CORE_WORKER_MEMBER_SYNC_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/deadline.h"
#include "core/base/ids.h"
#include "core/membership/lookups.h"
#include "core/membership/membership.h"
#include "core/membership/worker_info.h"
#include "core/rpc/agent.h"
#include "core/worker/member_callback.h"

namespace distgrad {

// Thread-safe. Tasks that wait for the store run on the thread of the look-ups.
class MemberSync {
 public:
  // The parts that it works with, which outlive the clock's and the look-ups' last task.
  struct Parts {
    WorkerRank self;
    bool worker0_serves_store;
    absl::Duration heartbeat_limit;
    Clock& clock;
    Membership& members;
    Lookups& lookups;
    Agent& agent;
    MemberCallback& callback;
  };

  explicit MemberSync(const Parts& parts) : parts_(parts) {}
  // Sets no timer any more, and cancels those that are set.
  void Stop();

  // Reads in the store what has happened to members, now and then, while a callback is set.
  void Follow();
  // Takes in what the store says of these workers.
  absl::Status UpdatePeers(const std::vector<WorkerInfo>& workers);
  // Takes members for alive that have taken back that they are lost: soon, for it asks the store
  // whether that still holds.
  void OnDenied(std::vector<WorkerInfo> members);
  // Adds to an error of waiting for all which worker served the store, if the store is gone.
  absl::Status NameTheStore(const absl::Status& status);

  // AgentService
  void OnUnreachable(WorkerRank peer, Incarnation incarnation, const absl::Status& why);
  void OnPeerLost() { MayBeLost(); }
  void OnUnwatched() { MayBeLost(); }
  void OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss);

 private:
  using Task = void (MemberSync::*)();

  // Looks later whether another worker has said that this one is lost: its end of a connection may
  // have broken, or it may have failed to open one.
  void MayBeLost();
  // Takes back that this worker is lost, should another one have said so: later, and again until
  // the store has taken it.
  void DenyLoss();
  // Does so once, now.
  absl::Status DenyLossNow();
  // Returns whether it has been done just now, and may be again and again.
  bool HasJustDenied() const;
  void FollowOnce();
  void Read();
  // Returns false if that is too soon for some of them.
  bool TakeDenied(const Membership::Losses& losses);
  // Returns whether this worker has told that the member is lost, which has answered since; and
  // takes that back next.
  bool TakesBack(const WorkerInfo& member) const;
  void MissStore(const absl::Status& why);
  // Runs a task that may wait for the store, after a time. `timer` is one of those below.
  void RunLater(absl::Duration wait, std::optional<Clock::TimerId>* timer, Task task);

  const Parts parts_;

  std::atomic<int> losses_to_deny_{0};  // that others may have claimed; soon
  std::atomic<bool> follows_{false};
  std::atomic<bool> misses_store_{false};  // and so takes the worker that serves it for lost
  // Used on the look-ups' thread alone.
  absl::Time denied_at_ = absl::InfinitePast();
  struct Marked {
    Incarnation incarnation = 0;
    uint64_t loss = 0;  // Agent::LossOf()
  };
  absl::flat_hash_map<WorkerRank, Marked> marked_;  // the losses that this worker has told
  // When one that was lost was last taken for alive because it has denied that.
  absl::flat_hash_map<std::pair<WorkerRank, Incarnation>, absl::Time> denial_taken_at_;
  // Used by Read() alone.
  int64_t changes_ = -1;                          // as last seen
  Deadline store_has_until_ = Deadline::Never();  // to answer, where it does not

  absl::Mutex mu_;
  // Guarded by mu_.
  // For the timers, of which one may fire again after Stop(); null from then on.
  std::shared_ptr<MemberSync> self_ ABSL_GUARDED_BY(mu_){this, [](MemberSync*) {}};
  absl::flat_hash_set<WorkerRank> asked_for_ ABSL_GUARDED_BY(mu_);  // those the store is asked for
  std::optional<Clock::TimerId> follow_timer_ ABSL_GUARDED_BY(mu_), deny_timer_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_WORKER_MEMBER_SYNC_H_
