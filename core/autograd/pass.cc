// Advances the state machine of a pass: what each notice changes, and what follows from it.
#include "core/autograd/pass.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace distgrad {

void Pass::Begin() {
  if (over()) return;
  Engage(std::nullopt, std::nullopt);
  if (state_ != State::kRunning) return;
  host_->FeedRoots();
  Advance();
}

void Pass::Engage(std::optional<WorkerRank> parent, std::optional<EdgeId> by) {
  parent_ = parent;
  state_ = State::kRunning;
  absl::StatusOr<PassPlan> plan = host_->Engage(by);
  if (!plan.ok()) {
    if (parent.has_value()) peers_.insert(*parent);
    return Abort(plan.status(), std::nullopt);
  }
  std::set<WorkerRank> certain(plan->certain.begin(), plan->certain.end());
  for (const EdgeEnd& end : plan->sends) awaited_.emplace(end.edge, end.peer);
  peers_.insert(plan->peers.begin(), plan->peers.end());
  if (parent.has_value()) peers_.insert(*parent);
  peers_.erase(self_);

  // Nobody shall wait for a gradient that cannot come.
  for (const EdgeEnd& end : plan->dead) {
    certain.insert(end.peer);
    host_->SendNoGradient(end, /*uncounted=*/!CountSent(end.peer));
  }
  // Every peer must hear of the pass without waiting for us, who may be waiting for it.
  for (WorkerRank peer : peers_) {
    if (certain.count(peer) > 0 || peer == parent) continue;
    host_->SendStart(peer);
    CountSent(peer);
  }
}

bool Pass::CountSent(WorkerRank to) {
  // What a worker sends itself cannot outlive its own part of the pass; and one that has sent us
  // something takes part, and is not done before it has what it waits for.
  if (to == self_ || owed_.count(to) > 0) return false;
  ++unacknowledged_[to];
  return true;
}

void Pass::Feed(EdgeId edge, Notice* arrived) {
  // A send node that is younger than our part of the pass belongs to the next one.
  if (awaited_.erase(edge) > 0) host_->FeedSend(edge, arrived);
}

bool Pass::Count(WorkerRank from, std::optional<EdgeId> by) {
  switch (state_) {
    case State::kNotEngaged:
      ++owed_[from];
      Engage(from, by);
      break;
    case State::kRunning:
      if (from != self_) ++owed_[from];
      break;
    case State::kDone:
      if (from == self_) break;
      owed_.try_emplace(from, 0);
      host_->SendAck(from, 1);
      for (const EdgeEnd& edge : std::exchange(late_[from], {})) {
        host_->SendNoGradient(edge, /*uncounted=*/true);
      }
      break;
    case State::kFailed:
      if (from != self_) host_->SendAbort(from, why_);
      break;
  }
  return running();
}

void Pass::OnEdge(WorkerRank from, EdgeId edge, bool uncounted, Notice* arrived) {
  if (uncounted ? !running() : !Count(from, edge)) return;
  const auto awaited = awaited_.find(edge);
  if (awaited != awaited_.end() && awaited->second != from) {
    peers_.insert(from);  // it hears of this as well
    return Fail(absl::InvalidArgumentError(
        absl::StrCat("worker ", from, " has sent worker ", self_, " a gradient for edge ", edge,
                     ", whose other end is worker ", awaited->second)));
  }
  Feed(edge, arrived);
  Advance();
}

void Pass::OnStart(WorkerRank from) {
  if (Count(from, std::nullopt)) Advance();
}

void Pass::OnAck(WorkerRank from, uint32_t count) {
  if (state_ != State::kRunning) return;
  auto it = unacknowledged_.find(from);
  if (it == unacknowledged_.end() || it->second < count) {
    return Fail(absl::InternalError(
        absl::StrCat("worker ", from, " acknowledged ", count, " messages more than it was sent")));
  }
  it->second -= count;
  if (it->second == 0) unacknowledged_.erase(it);
  Advance();
}

void Pass::OnAbort(WorkerRank from, const absl::Status& why) {
  if (over()) return;
  if (state_ == State::kNotEngaged) {
    // Nobody has heard of the pass from us.
    state_ = State::kFailed;
    why_ = why;
    return host_->Finish(why);
  }
  Abort(why, from);
}

bool Pass::CountGradient(WorkerRank to) { return state_ == State::kRunning && CountSent(to); }

void Pass::OnIdle(const absl::Status& status) {
  if (state_ != State::kRunning) return;
  if (!status.ok()) return Fail(status);
  Advance();
}

void Pass::OnLateRecv(EdgeEnd edge) {
  switch (state_) {
    case State::kNotEngaged:  // it will be part of the plan
    case State::kFailed:
      return;
    case State::kRunning:
      host_->SendNoGradient(edge, /*uncounted=*/!CountSent(edge.peer));
      peers_.insert(edge.peer);
      peers_.erase(self_);
      return;
    case State::kDone:
      // The other end may be waiting for it, and as long as it does the pass is not over. If so,
      // it has said something, or will: it saw to it that we hear of the pass.
      if (edge.peer == self_) return;
      if (owed_.count(edge.peer) > 0)
        host_->SendNoGradient(edge, /*uncounted=*/true);
      else
        late_[edge.peer].push_back(edge);
      return;
  }
}

void Pass::OnLostSend(EdgeId edge) {
  if (!running()) return;
  Feed(edge, /*arrived=*/nullptr);
  Advance();
}

void Pass::Fail(const absl::Status& why) {
  if (over()) return;
  Abort(why, std::nullopt);
}

void Pass::OnPeerLost(WorkerRank peer, const absl::Status& why) {
  if (state_ != State::kRunning || peers_.count(peer) == 0) return;
  peers_.erase(peer);
  Abort(why, peer);
}

void Pass::Abort(const absl::Status& why, std::optional<WorkerRank> from) {
  state_ = State::kFailed;
  why_ = why;
  host_->Stop(why);
  for (WorkerRank peer : peers_) {
    if (peer != from) host_->SendAbort(peer, why);
  }
  host_->Finish(why);
}

void Pass::Advance() {
  if (state_ != State::kRunning) return;
  if (!local_done_) {
    if (!awaited_.empty() || !host_->Idle()) return;
    local_done_ = true;
  }
  // Dijkstra and Scholten, "Termination detection for diffusing computations", 1980: the parent
  // hears last.
  const bool quiet = unacknowledged_.empty();
  for (auto& [peer, count] : owed_) {
    if (count == 0 || (peer == parent_ && !quiet)) continue;
    host_->SendAck(peer, std::exchange(count, 0));
  }
  if (!quiet) return;
  state_ = State::kDone;
  host_->Finish(absl::OkStatus());
}

std::vector<EdgeEnd> Pass::Awaited() const {
  std::vector<EdgeEnd> awaited;
  for (const auto& [edge, peer] : awaited_) awaited.push_back({edge, peer});
  return awaited;
}

}  // namespace distgrad
