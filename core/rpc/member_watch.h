// Decides which members an agent watches, and when one of them is lost: the next ones by rank, over
// connections that the agent keeps for that. docs/membership.md, "Lost members", has the rules. It
// has no clock and sends nothing: its owner tells it what happens.
#ifndef DISTGRAD_CORE_RPC_MEMBER_WATCH_H_
#define DISTGRAD_CORE_RPC_MEMBER_WATCH_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/monotonic_state.h"
#include "core/rpc/peers.h"

namespace distgrad {

// Thread-safe. Calls nothing but Peers and the callbacks that its functions are given.
class MemberWatch {
 public:
  // What is known of a link that has ended.
  struct ClosedLink {
    WorkerRank peer = 0;
    Incarnation incarnation = 0;
    bool was_heard = false;  // on this link, or on another one while this one was dead
    bool was_silent = false;
    bool is_refused = false;  // nobody listens where it was to lead
    absl::Time asked_for = {};
  };
  enum class Verdict { kNothing, kTryAgain, kLost };

  // A member that neither answers nor refuses is lost after `patience`.
  MemberWatch(std::shared_ptr<const Peers> peers, absl::Duration patience)
      : peers_(std::move(peers)), patience_(patience) {}

  // Starts to watch; false if it had started, or was stopped.
  bool Start();
  void Stop();
  bool watches() const;
  // Watches this member as well, whichever others do, until it has left or is lost. Of several all
  // are.
  void WatchToo(WorkerRank member);

  // Returns the members to ping, now and then: those that this worker watches, of those that it
  // watches too the ones that cannot be reached, and the one that watches it, which may not know of
  // it.
  std::vector<WorkerRank> Tick(bool is_first, absl::FunctionRef<bool(WorkerRank)> can_be_reached);

  Verdict OnClosed(const ClosedLink& link, const absl::Status& why, absl::Time now);

  bool IsWatched(WorkerRank worker) const;
  // Watches twice as many members, since a watched one is lost, and returns them. More may be lost
  // with their machine or network: to find them one after the other would take a heartbeat's limit
  // for each.
  std::vector<WorkerRank> WatchMore();

 private:
  enum class State { kIdle, kWatching, kStopped };

  bool IsAmongNext(WorkerRank worker) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<const Peers> peers_;
  const absl::Duration patience_;

  mutable absl::Mutex mu_;
  MonotonicState<State> state_ ABSL_GUARDED_BY(mu_){State::kIdle};
  size_t watched_ ABSL_GUARDED_BY(mu_) = 1;  // how many of the next members
  absl::flat_hash_set<WorkerRank> watched_too_ ABSL_GUARDED_BY(mu_);
  // The watched members that could not be reached, though nothing refused.
  struct Unreachable {
    Incarnation incarnation = 0;  // 0: not known
    absl::Time since = {};
  };
  absl::flat_hash_map<WorkerRank, Unreachable> unreachable_ ABSL_GUARDED_BY(mu_);
  absl::Time tried_again_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_MEMBER_WATCH_H_
