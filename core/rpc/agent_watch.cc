// The connections that an agent keeps with the members that it watches (member_watch.h).
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

}  // namespace

void Agent::Impl::WatchMembers(bool late) {
  if (!watch_.Start()) return;
  if (late) {
    if (const auto before = peers_->Before()) Ping(*before);
  }
  ArmWatch(std::min(heartbeat_.interval(), kFirst), /*is_first=*/true);
}

void Agent::Impl::WatchToo(WorkerId member) {
  watch_.WatchToo(member);
  if (!peers_->is_lost(member)) Ping(member);
}

void Agent::Impl::StopWatching() {
  watch_.Stop();
  std::optional<Clock::TimerId> timer;
  {
    absl::MutexLock lock(&mu_);
    timer = std::exchange(watch_timer_, std::nullopt);
  }
  if (timer) clock_->Cancel(*timer);
}

void Agent::Impl::ArmWatch(absl::Duration wait, bool is_first) {
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + wait, [weak = weak_from_this(), is_first] {
        if (auto self = weak.lock()) self->Watch(is_first);
      });
  bool stopped;
  {
    absl::MutexLock lock(&mu_);
    stopped = closed_ || !watch_.watches();
    if (!stopped) watch_timer_ = timer;
  }
  if (stopped) clock_->Cancel(timer);
}

void Agent::Impl::Watch(bool is_first) {
  std::vector<WorkerId> wanted;
  {
    absl::MutexLock lock(&mu_);
    watch_timer_.reset();
    if (closed_ || !watch_.watches()) return;
    wanted = watch_.Tick(is_first, [this](WorkerId peer) {
      mu_.AssertHeld();
      const auto link = links_.find(peer);
      return link != links_.end() && link->second->heard() > 0;
    });
  }
  ArmWatch(std::min(heartbeat_.interval(), kLongest), /*is_first=*/false);
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

void Agent::Impl::OnWatchedLinkClosed(const MemberWatch::ClosedLink& link,
                                      const absl::Status& why) {
  switch (watch_.OnClosed(link, why, clock_->Now())) {
    case MemberWatch::Verdict::kNothing:
      return;
    case MemberWatch::Verdict::kTryAgain:
      return Ping(link.peer);
    case MemberWatch::Verdict::kLost:
      // 0: nothing was tried, for the store has not said where it is.
      if (link.incarnation != 0) service_->OnUnreachable(link.peer, link.incarnation, why);
  }
}

void Agent::Impl::SetLost(WorkerId worker, Incarnation incarnation, absl::string_view reason) {
  const bool was_watched = watch_.IsWatched(worker);
  if (!peers_->SetLost(worker, incarnation, reason)) return;
  service_->OnMemberEvents();
  // Of others those look after it who watch it, or all would connect to ever more.
  if (!was_watched) return;
  for (const WorkerId next : watch_.WatchMore()) Ping(next);
}

void Agent::Impl::SetAlive(WorkerId worker, Incarnation incarnation) {
  if (peers_->SetAlive(worker, incarnation)) service_->OnMemberEvents();
}

}  // namespace distgrad
