// Keeps how many members are watched, and since when one of them could not be reached.
#include "core/rpc/member_watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace distgrad {
namespace {

constexpr absl::Duration kAgain = absl::Seconds(1);    // between attempts that follow a broken one
constexpr absl::Duration kRefusal = absl::Seconds(1);  // comes within that
constexpr size_t kMostWatched = 64;                    // at once

}  // namespace

bool MemberWatch::Start() {
  absl::MutexLock lock(&mu_);
  return state_.Advance(State::kWatching);
}

void MemberWatch::Stop() {
  absl::MutexLock lock(&mu_);
  state_.Advance(State::kStopped);
}

bool MemberWatch::watches() const {
  absl::MutexLock lock(&mu_);
  return state_ == State::kWatching;
}

void MemberWatch::WatchToo(WorkerRank member) {
  absl::MutexLock lock(&mu_);
  watched_too_.insert(member);
}

std::vector<WorkerRank> MemberWatch::Tick(bool is_first,
                                          absl::FunctionRef<bool(WorkerRank)> can_be_reached) {
  const std::optional<WorkerRank> before = peers_->Before();
  std::vector<WorkerRank> wanted, too;
  {
    absl::MutexLock lock(&mu_);
    wanted = peers_->After(watched_);
    absl::erase_if(watched_too_, [this](WorkerRank peer) {
      const std::optional<WorkerInfo> known = peers_->Find(peer);
      return (known && known->left) || peers_->is_lost(peer);
    });
    // One that it watches no more has all of its time should it do so again.
    absl::erase_if(unreachable_, [&](const auto& each) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const WorkerRank peer = each.first;
      const bool is_watched = watched_too_.contains(peer) ||
                              std::find(wanted.begin(), wanted.end(), peer) != wanted.end();
      return !is_watched || can_be_reached(peer);
    });
    if (std::all_of(wanted.begin(), wanted.end(), can_be_reached)) watched_ = 1;
    std::remove_copy_if(watched_too_.begin(), watched_too_.end(), std::back_inserter(too),
                        can_be_reached);
  }
  if (before && !is_first) {
    // The one before keeps a connection with us. If it has given that up it takes us for lost, or
    // does not know of us.
    wanted.push_back(*before);
  } else if (before && wanted == std::vector<WorkerRank>{*before} &&
             *before < peers_->self().rank) {
    // Of two alone, who begin at the same time, one opens the connection.
    wanted.clear();
  }
  wanted.insert(wanted.end(), too.begin(), too.end());
  return wanted;
}

// A connection that was good and breaks says little: its peer may have closed it. So another one is
// tried, which first asks the store whether the peer has left or come back elsewhere. If that is
// refused at once nobody is there. If it is not answered, or not taken in, or no way leads there,
// the peer may be stopped, short of something or cut off, and has as long to go on as on a
// connection that stands. If this worker lacks the means to try it knows nothing.
MemberWatch::Verdict MemberWatch::OnClosed(const ClosedLink& link, const absl::Status& why,
                                           absl::Time now) {
  absl::MutexLock lock(&mu_);
  if (link.was_heard) unreachable_.erase(link.peer);
  if (absl::IsResourceExhausted(why)) return Verdict::kNothing;  // Tick() tries again
  if (state_ != State::kWatching ||
      (!watched_too_.contains(link.peer) && !IsAmongNext(link.peer))) {
    return Verdict::kNothing;
  }
  bool is_lost = link.was_silent;
  if (!is_lost && !link.was_heard) {
    const Unreachable begin{.incarnation = link.incarnation, .since = link.asked_for};
    Unreachable& its = unreachable_.try_emplace(link.peer, begin).first->second;
    // What an earlier incarnation did not answer says nothing of this one.
    if (its.incarnation < begin.incarnation) its = begin;
    is_lost = (link.is_refused && now - link.asked_for < kRefusal) || now - its.since >= patience_;
  }
  if (is_lost) {
    unreachable_.erase(link.peer);
    return Verdict::kLost;
  }
  if (now - tried_again_ < kAgain) return Verdict::kNothing;  // Tick() will
  tried_again_ = now;
  return Verdict::kTryAgain;
}

bool MemberWatch::IsAmongNext(WorkerRank worker) const {
  const std::vector<WorkerRank> next = peers_->After(watched_);
  return std::find(next.begin(), next.end(), worker) != next.end();
}

bool MemberWatch::IsWatched(WorkerRank worker) const {
  absl::MutexLock lock(&mu_);
  return state_ == State::kWatching && IsAmongNext(worker);
}

std::vector<WorkerRank> MemberWatch::WatchMore() {
  absl::MutexLock lock(&mu_);
  if (state_ != State::kWatching) return {};
  const size_t more = std::min(2 * watched_, kMostWatched);
  std::vector<WorkerRank> next = peers_->After(more);  // before anything is changed
  watched_ = more;
  return next;
}

}  // namespace distgrad
