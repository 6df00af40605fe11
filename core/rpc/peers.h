// The members of a job, as an agent knows them.
#ifndef DISTGRAD_CORE_RPC_PEERS_H_
#define DISTGRAD_CORE_RPC_PEERS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "core/base/ids.h"
#include "core/membership/member_event.h"
#include "core/membership/worker_info.h"
#include "core/rpc/frame.h"

namespace distgrad {

// Thread-safe; calls nothing else. But for Start(), what throws std::bad_alloc has changed nothing,
// so that it may be said again.
class Peers {
 public:
  using Events = std::list<MemberEvent>;

  explicit Peers(size_t max_workers) : max_workers_(max_workers) {}

  // Sets the members, once; kFailedPrecondition after that.
  absl::Status Start(const WorkerInfo& self, std::vector<WorkerInfo> workers);

  WorkerInfo self() const;
  std::optional<WorkerInfo> Find(WorkerRank worker) const;
  // Returns the rank of a name; kNotFound, with the names that are known, if there is none.
  absl::StatusOr<WorkerRank> Find(absl::string_view name) const;
  // Return the members that have not left, this worker among them, by rank; and their number.
  std::vector<WorkerInfo> Members() const;
  size_t size() const;
  // Returns "'name' (rank)", for messages.
  std::string Describe(WorkerRank worker) const;
  // Returns the error for a rank that no worker has: kNotFound.
  static absl::Status NoWorker(int rank);

  // Takes in what the store says of a worker. Returns true if this is a new incarnation of one that
  // was known: what is left of the old one is to be ended. kFailedPrecondition for an incarnation
  // that is over; kResourceExhausted beyond max_workers.
  absl::StatusOr<bool> UpdatePeer(const WorkerInfo& worker);

  // Marks that incarnation of a worker as one that has left, as it says itself. What is said by one
  // that is over, and has come late, changes nothing.
  void SetLeft(WorkerRank worker, Incarnation incarnation);
  // Marks that incarnation of it as lost. It stays a member, for it may come back. Returns false if
  // this was known, or if it has left or come back since.
  bool SetLost(WorkerRank worker, Incarnation incarnation, absl::string_view reason);
  // Returns the number of the loss by which that incarnation of it is taken for lost; 0 if it is
  // not.
  uint64_t LossOf(WorkerRank worker, Incarnation incarnation) const;
  // Marks that incarnation of it as alive, by a sign of life that is later than this loss. Returns
  // false, and changes nothing, if it is not lost, or by a later loss.
  bool SetAlive(WorkerRank worker, Incarnation incarnation, uint64_t loss);
  bool is_lost(WorkerRank worker) const;

  // Returns the members that this worker is to watch: the next `count` by rank, the first ones
  // behind the last, without those that are lost and this one. If each worker watches the next one,
  // each is watched.
  std::vector<WorkerRank> After(size_t count) const;
  // Returns the member that is to watch this worker: the one before it.
  std::optional<WorkerRank> Before() const;

  // Keeps from now on what happens to members until it is taken, in its order; or no longer.
  void KeepEvents(bool keep);
  Events TakeEvents();

  // Says whether a connection from this peer is to be accepted: true if it is as we know it, false
  // if the store has to say. kFailedPrecondition if it is not meant for this incarnation of ours,
  // or comes from one that is over.
  absl::StatusOr<bool> Check(const Hello& hello) const;

 private:
  absl::Status Outdated(const WorkerInfo& known) const;
  // Add() and Replace() alone write workers_.
  void Add(WorkerInfo worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Replace(WorkerInfo& known, WorkerInfo worker) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Adds an event to these; Record() keeps them, and needs no memory for it.
  void Tell(MemberEvent::Kind kind, const WorkerInfo& worker, Events* events,
            absl::string_view reason = "") const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void Record(Events& events) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsWatchable(const WorkerInfo& worker) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const size_t max_workers_;

  mutable absl::Mutex mu_;
  // Guarded by mu_.
  WorkerInfo self_ ABSL_GUARDED_BY(mu_);
  std::map<WorkerRank, WorkerInfo> workers_ ABSL_GUARDED_BY(mu_);
  // Looked up for each call: the ranks by name, and how many have not left.
  absl::flat_hash_map<std::string, WorkerRank> ranks_ ABSL_GUARDED_BY(mu_);
  size_t size_ ABSL_GUARDED_BY(mu_) = 0;
  // The ranks of workers_ that are lost, and have neither left nor come back, with the numbers of
  // their losses; and the last number.
  std::map<WorkerRank, uint64_t> lost_ ABSL_GUARDED_BY(mu_);
  uint64_t last_loss_ ABSL_GUARDED_BY(mu_) = 0;
  bool keeps_events_ ABSL_GUARDED_BY(mu_) = false;
  Events events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_PEERS_H_
