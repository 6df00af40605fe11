// Keeps connections with the members that an agent watches (member_watch.h).
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/await_memory.h"
#include "core/rpc/agent.h"

namespace distgrad {
namespace {

constexpr absl::Duration kFirst = absl::Seconds(1);  // short jobs need none of it
constexpr absl::Duration kLongest = absl::Seconds(4);

}  // namespace

void Agent::WatchMembers(bool late) {
  if (!watch_.Start()) return;
  if (late) {
    if (const auto before = peers_->Before()) links_->Ping(*before);
  }
  ArmWatch(std::min(watch_interval_, kFirst), /*is_first=*/true);
}

void Agent::WatchToo(WorkerRank member) {
  watch_.WatchToo(member);
  if (!peers_->is_lost(member)) links_->Ping(member);
}

void Agent::StopWatching() {
  watch_.Stop();
  std::optional<Clock::TimerId> timer;
  {
    absl::MutexLock lock(&mu_);
    timer = std::exchange(watch_timer_, std::nullopt);
  }
  if (timer) clock_->Cancel(*timer);
}

void Agent::ArmWatch(absl::Duration wait, bool is_first) {
  const Clock::TimerId timer =
      clock_->At(clock_->Now() + wait, [weak = weak_from_this(), is_first] {
        if (auto self = weak.lock()) self->Watch(is_first);
      });
  bool stopped;
  {
    absl::MutexLock lock(&mu_);
    stopped = !watch_.watches();
    if (!stopped) watch_timer_ = timer;
  }
  if (stopped) clock_->Cancel(timer);
}

void Agent::Watch(bool is_first) {
  {
    absl::MutexLock lock(&mu_);
    watch_timer_.reset();
  }
  if (!watch_.watches()) return;
  ArmWatch(std::min(watch_interval_, kLongest), /*is_first=*/false);
  try {
    const std::vector<WorkerRank> wanted =
        watch_.Tick(is_first, [this](WorkerRank peer) { return links_->HasHeardFrom(peer); });
    // An attempt of it that failed at its end alone may have left no trace here.
    const std::optional<WorkerRank> before = peers_->Before();
    if (!is_first && before && !links_->HasHeardFrom(*before)) service_->OnUnwatched();
    for (const WorkerRank peer : wanted) links_->Ping(peer);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next time does it
  }
}

void Agent::OnLinkEnded(const MemberWatch::ClosedLink& link, const absl::Status& why) {
  switch (watch_.OnClosed(link, why, clock_->Now())) {
    case MemberWatch::Verdict::kNothing:
      return;
    case MemberWatch::Verdict::kTryAgain:
      return links_->Ping(link.peer);
    case MemberWatch::Verdict::kLost:
      // 0: nothing was tried, for the store has not said where it is.
      if (link.incarnation != 0) service_->OnUnreachable(link.peer, link.incarnation, why);
  }
}

void Agent::SetLost(WorkerRank worker, Incarnation incarnation, absl::string_view reason) {
  const bool was_watched = watch_.IsWatched(worker);
  if (!peers_->SetLost(worker, incarnation, reason)) return;
  // The loss is noted, and not once more: so nobody could try again what follows.
  AwaitMemory([&] { service_->OnMemberEvents(); });
  // One that others watch is theirs to follow up, or all workers would connect to ever more.
  if (!was_watched) return;
  for (const WorkerRank next : AwaitMemory([&] { return watch_.WatchMore(); })) {
    AwaitMemory([&] { links_->Ping(next); });
  }
}

void Agent::SetAlive(WorkerRank worker, Incarnation incarnation) {
  const uint64_t loss = peers_->LossOf(worker, incarnation);
  if (peers_->SetAlive(worker, incarnation, loss)) service_->OnMemberEvents();
}

}  // namespace distgrad
