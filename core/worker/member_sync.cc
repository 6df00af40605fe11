// Asks the store, and tells the agent and the store which workers are lost.
#include "core/worker/member_sync.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "core/base/await_memory.h"

namespace distgrad {
namespace {

constexpr absl::Duration kPause = absl::Seconds(1);  // between two looks at the members

}  // namespace

void MemberSync::Stop() {
  absl::MutexLock lock(&mu_);
  self_ = nullptr;
  for (auto* timer : {&follow_timer_, &deny_timer_}) {
    if (*timer) parts_.clock.Cancel(**timer);
  }
}

absl::Status MemberSync::UpdatePeers(const std::vector<WorkerInfo>& workers) {
  for (const WorkerInfo& worker : workers) {
    // An entry of an incarnation that is over is older than what we know, and says nothing.
    const absl::Status learned = parts_.agent.UpdatePeer(worker);
    if (!learned.ok() && !absl::IsFailedPrecondition(learned)) return learned;
  }
  return absl::OkStatus();
}

absl::Status MemberSync::NameTheStore(const absl::Status& status) {
  if (!parts_.worker0_serves_store || parts_.self == 0 || !absl::IsUnavailable(status))
    return status;
  const absl::Status store = parts_.members.Changes().status();
  if (!absl::IsUnavailable(store) && !absl::IsDeadlineExceeded(store)) return status;
  return absl::UnavailableError(absl::StrCat(
      status.message(), "; worker ", parts_.agent.Describe(0), ", which serves the job's store, ",
      absl::IsUnavailable(store) ? "is gone" : "does not answer"));
}

// --------------------------------------------------------------------------- Lost, and not

// Of one that cannot be reached the store says whether it has left, or come back elsewhere. A store
// that is silent says nothing: this worker may be the one that is cut off. Then it is asked again,
// with the agent's next attempt; but not where both are silent, the store and who serves it.
void MemberSync::OnUnreachable(WorkerRank peer, Incarnation incarnation, const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (!asked_for_.insert(peer).second) return;
  }
  absl::Cleanup is_not_asked_for = [this, peer] {
    absl::MutexLock lock(&mu_);
    asked_for_.erase(peer);
  };
  parts_.lookups.Find(
      peer, absl::Seconds(5),
      [this, peer, incarnation, why](const absl::StatusOr<WorkerInfo>& found) {
        {
          absl::MutexLock lock(&mu_);
          asked_for_.erase(peer);
        }
        // When all have finished, the others end one by one, and with them the store.
        if (parts_.members.finished() && parts_.self != 0) return;
        const std::string reason(why.message());
        if (found.ok()) {
          parts_.agent.UpdatePeer(*found).IgnoreError();  // of an incarnation that is over, say
          if (found->left || found->incarnation != incarnation) return;
          // It was faster than the store. Should it be dead after all its connection ends, and it
          // is asked for again.
          if (parts_.agent.Hears(peer, incarnation)) return;
          // Who waits for it would not hear of it. It is tried again, and so is this.
          if (!parts_.members.MarkLost(*found, reason)) return;
        } else if (peer == 0 && parts_.worker0_serves_store &&
                   absl::IsDeadlineExceeded(found.status())) {
          misses_store_ = true;
        } else if (!absl::IsUnavailable(found.status())) {
          return;
        }
        // The loss has been told, and from here on nothing of this is tried again.
        AwaitMemory([&] { parts_.agent.SetLost(peer, incarnation, reason); });
        if (found.ok()) {
          const uint64_t loss = parts_.agent.LossOf(peer, incarnation);
          AwaitMemory([&] { marked_[peer] = {incarnation, loss}; });
        }
        // It may have connected just before that, and does not again.
        AwaitMemory([&] { parts_.agent.AskLost(peer, incarnation); });
      });
  std::move(is_not_asked_for).Cancel();
}

// The member need not deny a loss that is told when its connections stand again: so this worker,
// which has told it, takes it back. An answer to an earlier loss says nothing of the one told.
void MemberSync::OnRevived(WorkerRank peer, Incarnation incarnation, uint64_t loss) {
  parts_.lookups.Run([this, peer, incarnation, loss] {
    const auto marked = marked_.find(peer);
    if (marked == marked_.end() || marked->second.loss > loss) return;
    parts_.members.MarkAlive(peer, incarnation);
    marked_.erase(marked);
  });
}

void MemberSync::MayBeLost() {
  if (parts_.heartbeat_limit == absl::InfiniteDuration() || losses_to_deny_++ > 0) return;
  // Who finds no memory for it says so again.
  absl::Cleanup none_is_seen = [this] { losses_to_deny_ = 0; };
  RunLater(parts_.heartbeat_limit, &deny_timer_, &MemberSync::DenyLoss);
  std::move(none_is_seen).Cancel();
}

void MemberSync::DenyLoss() {
  const int seen = losses_to_deny_;
  // A store that is silent or full may yet take it; one that is gone says so at once, each time.
  const bool is_over = DenyLossNow().ok();
  // Of a connection that broke meanwhile the other end may speak yet.
  if (is_over && losses_to_deny_.fetch_sub(seen) == seen) return;
  RunLater(parts_.heartbeat_limit, &deny_timer_, &MemberSync::DenyLoss);
}

absl::Status MemberSync::DenyLossNow() {
  const absl::StatusOr<bool> denied = parts_.members.DenyLoss();
  if (denied.ok() && *denied) denied_at_ = parts_.clock.Now();
  return denied.status();
}

bool MemberSync::HasJustDenied() const {
  return parts_.heartbeat_limit != absl::InfiniteDuration() &&
         parts_.clock.Now() - denied_at_ < parts_.heartbeat_limit;
}

void MemberSync::RunLater(absl::Duration wait, std::optional<Clock::TimerId>* timer, Task task) {
  absl::MutexLock lock(&mu_);
  if (self_ == nullptr) return;
  *timer = parts_.clock.At(
      parts_.clock.Now() + wait, [weak = std::weak_ptr<MemberSync>(self_), wait, timer, task] {
        const auto self = weak.lock();
        if (self == nullptr) return;
        const bool runs = self->parts_.lookups.Run([raw = self.get(), task] { (raw->*task)(); });
        // Where there is no thread for it now there may be one later.
        if (!runs) self->RunLater(wait, timer, task);
      });
}

// ------------------------------------------------------------------------------- Following

void MemberSync::Follow() {
  if (follows_.exchange(true)) return;
  absl::Cleanup does_not_follow = [this] { follows_ = false; };  // where there is no memory for it
  if (!parts_.lookups.Run([this] { FollowOnce(); })) {
    RunLater(kPause, &follow_timer_, &MemberSync::FollowOnce);
  }
  std::move(does_not_follow).Cancel();
}

void MemberSync::FollowOnce() {
  if (!parts_.callback.is_set()) {
    follows_ = false;
    // Another may have been set before it was seen that this ends.
    if (!parts_.callback.is_set() || follows_.exchange(true)) return;
  }
  try {
    Read();
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next one reads it
  }
  RunLater(kPause, &follow_timer_, &MemberSync::FollowOnce);
}

// Nobody can write to the store that the worker that serves it is lost.
void MemberSync::MissStore(const absl::Status& why) {
  if (!parts_.worker0_serves_store || parts_.self == 0 || parts_.members.finished()) return;
  if (absl::IsUnavailable(why))
    return parts_.agent.WatchToo(0);  // it has ended, as that one has, or will
  if (store_has_until_.is_never()) {
    store_has_until_ = Deadline::After(parts_.heartbeat_limit);
  } else if (store_has_until_.Passed()) {
    misses_store_ = true;
    const absl::StatusOr<WorkerInfo> worker0 = parts_.agent.Info(0);
    if (worker0.ok()) parts_.agent.SetLost(0, worker0->incarnation, why.message());
  }
}

void MemberSync::Read() {
  const absl::StatusOr<int64_t> changes = parts_.members.Changes();
  if (!changes.ok()) return MissStore(changes.status());
  store_has_until_ = Deadline::Never();
  // What the store itself says of that worker is another matter.
  if (misses_store_ && !marked_.contains(0)) {
    if (const auto worker0 = parts_.agent.Info(0); worker0.ok())
      parts_.agent.SetAlive(0, worker0->incarnation);
  }
  misses_store_ = false;
  if (*changes == changes_) return;
  const absl::StatusOr<std::vector<WorkerInfo>> all = parts_.members.AllEver(absl::InfinitePast());
  if (!all.ok() || !UpdatePeers(*all).ok()) return;
  const absl::StatusOr<Membership::Losses> losses = parts_.members.LossesOf(*all);
  if (!losses.ok()) return;
  bool is_all = losses->are_all_said;
  for (const Membership::LostMember& member : losses->lost) {
    if (TakesBack(member.worker)) {
      is_all = false;
      continue;
    }
    // No connection need have broken here. Two that cannot reach each other, and both reach the
    // store, say this in turn for as long as that lasts, and all read it: so not at once again.
    // The next look finds no loss any more, though memory may have failed before it was heard that
    // there is none.
    if (member.worker.rank == parts_.self) {
      AwaitMemory([&] {
        if (HasJustDenied()) return MayBeLost();
        if (DenyLossNow().ok()) return;
        is_all = false;
        MayBeLost();
      });
    }
    parts_.agent.SetLost(member.worker.rank, member.worker.incarnation, member.reason);
  }
  is_all = TakeDenied(*losses) && is_all;
  // What this worker itself has to say of a loss, or takes back, is read when it is there.
  if (is_all) changes_ = *changes;
}

// A member that this worker cannot reach, and that denies it, is not tried again at once: both
// would argue for as long as that lasts.
bool MemberSync::TakeDenied(const Membership::Losses& losses) {
  bool is_all = true;
  const absl::Time now = parts_.clock.Now();
  for (const WorkerInfo& member : losses.denied) {
    if (parts_.agent.LossOf(member.rank, member.incarnation) != 0) {
      const auto [taken, is_first] =
          denial_taken_at_.try_emplace({member.rank, member.incarnation}, now);
      if (!is_first && parts_.heartbeat_limit != absl::InfiniteDuration() &&
          now - taken->second < parts_.heartbeat_limit) {
        is_all = false;
        continue;
      }
      taken->second = now;
    }
    marked_.erase(member.rank);
    parts_.agent.SetAlive(member.rank, member.incarnation);
  }
  return is_all;
}

// Whoever told of the loss watches the member again from then on, also where nobody reads what
// happens to members: or nobody would find it lost once more. A loss that is told meanwhile is one
// that this denial does not concern.
void MemberSync::OnDenied(std::vector<WorkerInfo> members) {
  const auto is_alive = [this](const WorkerInfo& member) {
    return parts_.agent.LossOf(member.rank, member.incarnation) == 0;
  };
  members.erase(std::remove_if(members.begin(), members.end(), is_alive), members.end());
  if (members.empty()) return;
  // Where there is no thread for it the barrier's next look brings it again.
  parts_.lookups.Run([this, members = std::move(members)] {
    const absl::StatusOr<Membership::Losses> losses = parts_.members.LossesOf(members);
    if (losses.ok()) TakeDenied(*losses);  // what is left the next look brings
  });
}

bool MemberSync::TakesBack(const WorkerInfo& member) const {
  const auto marked = marked_.find(member.rank);
  return marked != marked_.end() && marked->second.incarnation == member.incarnation &&
         marked->second.loss != 0 && parts_.agent.LossOf(member.rank, member.incarnation) == 0;
}

}  // namespace distgrad
