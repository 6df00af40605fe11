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
  for (WorkerInfo& worker : workers) workers_.emplace(worker.id, std::move(worker));
  return absl::OkStatus();
}

WorkerInfo Peers::self() const {
  absl::MutexLock lock(&mu_);
  return self_;
}

std::optional<WorkerInfo> Peers::Find(WorkerId worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it == workers_.end()) return std::nullopt;
  return it->second;
}

absl::StatusOr<WorkerId> Peers::Find(absl::string_view name) const {
  absl::MutexLock lock(&mu_);
  std::vector<absl::string_view> names;
  for (const auto& [id, worker] : workers_) {
    if (worker.name == name) return id;
    if (!worker.left) names.push_back(worker.name);
  }
  std::sort(names.begin(), names.end());
  return absl::NotFoundError(absl::StrCat(
      "there is no worker '", name, "' in this job; there are: ", absl::StrJoin(names, ", ")));
}

std::vector<WorkerInfo> Peers::Members() const {
  absl::MutexLock lock(&mu_);
  std::vector<WorkerInfo> members;
  for (const auto& [id, worker] : workers_) {
    if (!worker.left) members.push_back(worker);
  }
  return members;
}

std::string Peers::Describe(WorkerId worker) const {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  return it == workers_.end() ? absl::StrCat(worker)
                              : absl::StrCat("'", it->second.name, "' (", worker, ")");
}

absl::Status Peers::Outdated(const WorkerInfo& known) const {
  return absl::FailedPreconditionError(
      absl::StrCat("it is of a life of worker '", known.name, "' (", known.id,
                   ") that is over: the worker has come back since"));
}

absl::StatusOr<bool> Peers::Learn(const WorkerInfo& worker) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker.id);
  if (it == workers_.end()) {
    if (workers_.size() >= max_workers_) {
      return absl::ResourceExhaustedError(absl::StrCat("worker '", worker.name, "' (", worker.id,
                                                       ") is one more than max_workers, ",
                                                       max_workers_));
    }
    workers_.emplace(worker.id, worker);
    return false;
  }
  WorkerInfo& known = it->second;
  if (worker.incarnation < known.incarnation) return Outdated(known);
  const bool new_life = worker.incarnation > known.incarnation;
  // That it leaves is heard from itself, too, and maybe before the store knows.
  const bool left = worker.left || (known.left && !new_life);
  known = worker;
  known.left = left;
  if (worker.id == self_.id) return false;  // our own seat was taken; the new life calls on others
  return new_life;
}

void Peers::SetLeft(WorkerId worker) {
  absl::MutexLock lock(&mu_);
  const auto it = workers_.find(worker);
  if (it != workers_.end()) it->second.left = true;
}

absl::StatusOr<bool> Peers::Check(const Hello& hello) const {
  absl::MutexLock lock(&mu_);
  if (hello.to != self_.id || hello.to_incarnation != self_.incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it was meant for another worker, or for an earlier life of '", self_.name, "'"));
  }
  if (hello.from == self_.id) {
    return absl::FailedPreconditionError(
        absl::StrCat("it comes from another life of '", self_.name, "'"));
  }
  const auto from = workers_.find(hello.from);
  if (from == workers_.end()) return false;
  if (hello.from_incarnation < from->second.incarnation) return Outdated(from->second);
  return hello.from_incarnation == from->second.incarnation;
}

}  // namespace distgrad
