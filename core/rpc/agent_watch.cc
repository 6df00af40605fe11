// Whom an agent watches: the next members by id, over connections that it keeps for that.
// docs/membership.md, "Lost members", has the rules.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/rpc/agent_impl.h"

namespace distgrad {
namespace {

constexpr absl::Duration kFirst = absl::Seconds(1);  // short jobs need none of it
constexpr absl::Duration kLongest = absl::Seconds(4);
constexpr absl::Duration kAgain = absl::Seconds(1);    // between attempts that follow a broken one
constexpr absl::Duration kRefusal = absl::Seconds(1);  // comes within that
constexpr size_t kMostWatched = 64;                    // at once

}  // namespace

void Agent::Impl::WatchMembers(bool late) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || std::exchange(watches_, true)) return;
  }
  if (late) {
    if (const auto before = peers_.Before()) Ping(*before);
  }
  ArmWatch(std::min(heartbeat_.interval(), kFirst), /*is_first=*/true);
}

void Agent::Impl::WatchToo(WorkerId member) {
  {
    absl::MutexLock lock(&mu_);
    watched_too_ = member;
  }
  if (!peers_.is_lost(member)) Ping(member);
}

void Agent::Impl::StopWatching() {
  std::optional<Clock::TimerId> watch;
  {
    absl::MutexLock lock(&mu_);
    watches_ = false;
    watch = std::exchange(watch_, std::nullopt);
  }
  if (watch) clock_->Cancel(*watch);
}

void Agent::Impl::ArmWatch(absl::Duration wait, bool is_first) {
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + wait, [weak = weak_from_this(), is_first] {
        if (auto self = weak.lock()) self->Watch(is_first);
      });
  bool stopped;
  {
    absl::MutexLock lock(&mu_);
    stopped = closed_ || !watches_;
    if (!stopped) watch_ = timer;
  }
  if (stopped) clock_->Cancel(timer);
}

void Agent::Impl::Watch(bool is_first) {
  const std::optional<WorkerId> before = peers_.Before();
  std::vector<WorkerId> wanted;
  {
    absl::MutexLock lock(&mu_);
    watch_.reset();
    if (closed_ || !watches_) return;
    std::vector<WorkerId> after = peers_.After(watched_);
    const auto can_be_reached = [&](WorkerId peer) {
      mu_.AssertHeld();
      const auto link = links_.find(peer);
      const bool can = link != links_.end() && link->second->heard() > 0;
      if (can) unreachable_.erase(peer);
      return can;
    };
    bool all_can = true;
    for (const WorkerId peer : after) all_can = can_be_reached(peer) && all_can;
    if (all_can) watched_ = 1;
    wanted = std::move(after);
  }
  ArmWatch(std::min(heartbeat_.interval(), kLongest), /*is_first=*/false);
  if (before) {
    if (!is_first) {
      // The one before keeps a connection with us. If it has given that up it takes us for lost, or
      // does not know of us.
      wanted.push_back(*before);
    } else if (wanted == std::vector<WorkerId>{*before} && *before < peers_.self().id) {
      // Of two alone, who begin at the same time, one opens the connection.
      wanted.clear();
    }
  }
  for (const WorkerId peer : wanted) Ping(peer);
}

// Heartbeats do the rest, as on any connection.
void Agent::Impl::Ping(WorkerId peer) {
  std::shared_ptr<Link> link;
  {
    absl::MutexLock lock(&mu_);
    if (links_.contains(peer)) return;
    absl::StatusOr<std::shared_ptr<Link>> made = LinkTo(peer);
    if (!made.ok()) return;
    link = *std::move(made);
  }
  Packet ping;
  AppendFrame({.kind = FrameKind::kPing}, &ping.bytes);
  link->Send(std::move(ping));
}

// A connection that was good and breaks says little: its peer may have closed it. So another one is
// tried, which first asks the store whether the peer has left or come back elsewhere. If that is
// refused at once nobody is there. If it is not answered, or not taken in, the peer may be stopped
// or short of something, and has as long to go on as on a connection that stands. If this worker
// lacks the means to try it knows nothing.
void Agent::Impl::OnWatchedLinkClosed(const ClosedLink& link, const absl::Status& why) {
  if (absl::IsResourceExhausted(why)) return;  // Watch() tries again
  const WorkerId peer = link.peer;
  bool is_lost = link.was_silent;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || !watches_) return;
    const std::vector<WorkerId> after = peers_.After(watched_);
    if (peer != watched_too_ && std::find(after.begin(), after.end(), peer) == after.end()) return;
    const absl::Time now = clock_->Now();
    if (!is_lost && !link.was_heard) {
      const absl::Time since = unreachable_.try_emplace(peer, link.asked_for).first->second;
      is_lost = (!link.is_there && now - link.asked_for < kRefusal) ||
                now - since >= heartbeat_.limit() - heartbeat_.interval();
    }
    if (is_lost) {
      unreachable_.erase(peer);
    } else {
      if (now - tried_again_ < kAgain) return;  // Watch() will
      tried_again_ = now;
    }
  }
  if (!is_lost) return Ping(peer);
  // 0: nothing was tried, for the store has not said where it is.
  if (link.incarnation != 0) service_->OnUnreachable(peer, link.incarnation, why);
}

void Agent::Impl::SetLost(WorkerId worker, Incarnation incarnation, absl::string_view reason) {
  bool was_watched;
  {
    absl::MutexLock lock(&mu_);
    const std::vector<WorkerId> before = peers_.After(watched_);
    was_watched = watches_ && std::find(before.begin(), before.end(), worker) != before.end();
  }
  if (!peers_.SetLost(worker, incarnation, reason)) return;
  service_->OnMemberEvents();
  // Of others those look after it who watch it, or all would connect to ever more.
  if (!was_watched) return;
  std::vector<WorkerId> after;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || !watches_) return;
    // Where one is lost more may be, with their machine or their network. To find them one after
    // the other would take a heartbeat's limit for each.
    watched_ = std::min(2 * watched_, kMostWatched);
    after = peers_.After(watched_);
  }
  for (const WorkerId next : after) Ping(next);
}

void Agent::Impl::SetAlive(WorkerId worker, Incarnation incarnation) {
  if (peers_.SetAlive(worker, incarnation)) service_->OnMemberEvents();
}

}  // namespace distgrad
