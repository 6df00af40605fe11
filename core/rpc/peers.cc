// Compares incarnations, and keeps what has happened to members until it is taken.
#include "core/rpc/peers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {

absl::Status Peers::Start(const WorkerInfo& self, std::vector<WorkerInfo> workers) {
  absl::MutexLock lock(&mu_);
  if (!workers_.empty()) return absl::FailedPreconditionError("the agent is started already");
  self_ = self;
  for (WorkerInfo& worker : workers) {
    if (workers_.count(worker.rank) == 0) Add(std::move(worker));
  }
  return absl::OkStatus();
}

void Peers::Add(WorkerInfo worker) {
  const WorkerRank rank = worker.rank;
  const auto added = workers_.emplace(rank, std::move(worker)).first;
  try {
    ranks_.try_emplace(added->second.name, rank);
  } catch (...) {
    workers_.erase(added);
    throw;
  }
  size_ += added->second.left ? 0 : 1;
}

void Peers::Replace(WorkerInfo& known, WorkerInfo worker) {
  if (known.name != worker.name) {
    ranks_.try_emplace(worker.name, worker.rank);
    if (const auto found = ranks_.find(known.name);
        found != ranks_.end() && found->second == known.rank) {
      ranks_.erase(found);
    }
  }
  size_ += (known.left ? 1 : 0) - (worker.left ? 1 : 0);
  known = std::move(worker);
}

size_t Peers::size() const {
  absl::MutexLock lock(&mu_);
  return size_;
}

WorkerInfo Peers::self() const {
  absl::MutexLock lock(&mu_);
  return self_;
}

std::optional<WorkerInfo> Peers::Find(WorkerRank worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end()) return std::nullopt;
  return it->second;
}

absl::StatusOr<WorkerRank> Peers::Find(absl::string_view name) const {
  absl::MutexLock lock(&mu_);
  if (const auto found = ranks_.find(name); found != ranks_.end()) return found->second;
  std::vector<absl::string_view> names;
  for (const auto& [rank, worker] : workers_) {
    if (!worker.left) names.push_back(worker.name);
  }
  std::sort(names.begin(), names.end());
  return absl::NotFoundError(absl::StrCat(
      "there is no worker '", name, "' in this job; there are: ", absl::StrJoin(names, ", ")));
}

std::vector<WorkerInfo> Peers::Members() const {
  absl::MutexLock lock(&mu_);
  std::vector<WorkerInfo> members;
  for (const auto& [rank, worker] : workers_) {
    if (!worker.left) members.push_back(worker);
  }
  return members;
}

std::string Peers::Describe(WorkerRank worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  return it == workers_.end() ? absl::StrCat(worker)
                              : absl::StrCat("'", it->second.name, "' (", worker, ")");
}

absl::Status Peers::NoWorker(int rank) {
  return absl::NotFoundError(absl::StrCat("there is no worker with rank ", rank, " in this job"));
}

absl::Status Peers::Outdated(const WorkerInfo& known) const {
  return absl::FailedPreconditionError(
      absl::StrCat("it is of an incarnation of worker '", known.name, "' (", known.rank,
                   ") that is over: the worker has come back since"));
}

absl::StatusOr<bool> Peers::UpdatePeer(const WorkerInfo& worker) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker.rank);
  if (it == workers_.end()) {
    if (workers_.size() >= max_workers_) {
      return absl::ResourceExhaustedError(absl::StrCat("worker '", worker.name, "' (", worker.rank,
                                                       ") is one more than max_workers, ",
                                                       max_workers_));
    }
    Events joined;
    if (!worker.left) Tell(MemberEvent::Kind::kJoined, worker, &joined);
    Add(worker);
    Record(joined);
    return false;
  }
  WorkerInfo& known = it->second;
  if (worker.incarnation < known.incarnation) return Outdated(known);
  const bool is_new = worker.incarnation > known.incarnation;
  // That it leaves is heard from itself, too, and maybe before the store knows.
  WorkerInfo now = worker;
  now.left = worker.left || (known.left && !is_new);
  const bool was_there = !known.left && lost_.count(worker.rank) == 0;
  Events events;
  if (is_new && was_there) {
    Tell(MemberEvent::Kind::kLost, known, &events, "it has come back as a new incarnation");
  }
  if (!is_new && was_there && now.left) Tell(MemberEvent::Kind::kLeft, known, &events);
  if (is_new && !now.left) Tell(MemberEvent::Kind::kJoined, now, &events);
  const bool is_over = is_new || now.left;
  Replace(known, std::move(now));
  if (is_over) lost_.erase(worker.rank);
  Record(events);
  if (worker.rank == self_.rank)
    return false;  // our own rank was claimed again; the new incarnation calls
  return is_new;
}

void Peers::SetLeft(WorkerRank worker, Incarnation incarnation) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end() || it->second.left || it->second.incarnation != incarnation) return;
  Events told;
  if (lost_.count(worker) == 0) Tell(MemberEvent::Kind::kLeft, it->second, &told);
  WorkerInfo left = it->second;
  left.left = true;
  Replace(it->second, std::move(left));
  lost_.erase(worker);
  Record(told);
}

// --------------------------------------------------------------------------- Lost, and found

bool Peers::SetLost(WorkerRank worker, Incarnation incarnation, absl::string_view reason) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end() || it->second.left || it->second.incarnation != incarnation ||
      worker == self_.rank || lost_.count(worker) > 0) {
    return false;
  }
  Events told;
  Tell(MemberEvent::Kind::kLost, it->second, &told, reason);
  lost_.emplace(worker, last_loss_ + 1);
  ++last_loss_;
  Record(told);
  return true;
}

uint64_t Peers::LossOf(WorkerRank worker, Incarnation incarnation) const {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end() || it->second.incarnation != incarnation) return 0;
  const auto lost = lost_.find(worker);
  return lost == lost_.end() ? 0 : lost->second;
}

bool Peers::SetAlive(WorkerRank worker, Incarnation incarnation, uint64_t loss) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end() || it->second.incarnation != incarnation) return false;
  const auto lost = lost_.find(worker);
  if (lost == lost_.end() || lost->second != loss) return false;
  Events told;
  Tell(MemberEvent::Kind::kJoined, it->second, &told);
  lost_.erase(lost);
  Record(told);
  return true;
}

bool Peers::is_lost(WorkerRank worker) const {
  absl::MutexLock lock(&mu_);
  return lost_.count(worker) > 0;
}

bool Peers::IsWatchable(const WorkerInfo& worker) const {
  return worker.rank != self_.rank && !worker.left && lost_.count(worker.rank) == 0;
}

std::vector<WorkerRank> Peers::After(size_t count) const {
  absl::MutexLock lock(&mu_);
  std::vector<WorkerRank> after;
  const auto self = workers_.upper_bound(self_.rank);
  for (auto it = self; it != workers_.end() && after.size() < count; ++it) {
    if (IsWatchable(it->second)) after.push_back(it->first);
  }
  for (auto it = workers_.begin(); it != self && after.size() < count; ++it) {
    if (IsWatchable(it->second)) after.push_back(it->first);
  }
  return after;
}

std::optional<WorkerRank> Peers::Before() const {
  absl::MutexLock lock(&mu_);
  std::optional<WorkerRank> before, last;
  for (const auto& [rank, worker] : workers_) {
    if (!IsWatchable(worker)) continue;
    if (rank < self_.rank) before = rank;
    last = rank;
  }
  return before ? before : last;
}

void Peers::KeepEvents(bool keep) {
  absl::MutexLock lock(&mu_);
  keeps_events_ = keep;
  if (!keep) events_.clear();
}

Peers::Events Peers::TakeEvents() {
  absl::MutexLock lock(&mu_);
  return std::exchange(events_, {});
}

void Peers::Tell(MemberEvent::Kind kind, const WorkerInfo& worker, Events* events,
                 absl::string_view reason) const {
  if (!keeps_events_ || worker.rank == self_.rank) return;
  events->push_back({kind, worker.rank, worker.name, worker.incarnation, std::string(reason)});
}

void Peers::Record(Events& events) { events_.splice(events_.end(), events); }

absl::StatusOr<bool> Peers::Check(const Hello& hello) const {
  absl::MutexLock lock(&mu_);
  if (hello.to != self_.rank || hello.to_incarnation != self_.incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it was meant for another worker, or for an earlier incarnation of '", self_.name, "'"));
  }
  if (hello.from == self_.rank) {
    return absl::FailedPreconditionError(
        absl::StrCat("it comes from another incarnation of '", self_.name, "'"));
  }
  const auto from = workers_.find(hello.from);
  if (from == workers_.end()) return false;
  if (hello.from_incarnation < from->second.incarnation) return Outdated(from->second);
  return hello.from_incarnation == from->second.incarnation;
}

}  // namespace distgrad
