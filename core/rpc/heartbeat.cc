// Compares what each link has heard between two ticks.
#include "core/rpc/heartbeat.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace distgrad {
namespace {

// So many answers to pings of the other link say that those of a link for large packets have had
// their time: of the ten pings within twice the limit the first answers may be to earlier ones.
constexpr uint64_t kEnoughAnswers = 5;

}  // namespace

Heartbeat::Verdict Heartbeat::Tick(absl::Time now, const std::vector<Reading>& readings) {
  const bool slept = now - ticked_ > 2 * interval();
  absl::flat_hash_map<uint64_t, Sign> links;
  absl::flat_hash_map<WorkerRank, absl::Time> peers;
  for (const Reading& reading : readings) {
    const auto before = links_.find(reading.link);
    Sign sign{reading.heard, reading.sent, reading.answered, now, now};
    // The first tick that sees something takes it for new, though it may be as old as the last
    // tick: that is the fifth of the limit by which a loss comes early.
    if (before != links_.end() && before->second.heard == reading.heard && !slept) {
      sign.last = before->second.last;
      if (reading.answers || !reading.is_bulk) sign.pinged = before->second.pinged;
      if (before->second.sent == reading.sent) sign.stuck = before->second.stuck;
    }
    if (before != links_.end() && before->second.answered == reading.answered && !slept) {
      sign.last_answer = before->second.last_answer;
      if (reading.answers) {
        sign.pinged_for_answer = before->second.pinged_for_answer;
        sign.main_answered = before->second.main_answered;
      }
    }
    sign.stuck = reading.answers ? absl::InfiniteFuture() : std::min(sign.stuck, now);
    links.emplace(reading.link, sign);
    // A new link of our own is no sign of life.
    if (!reading.peer || reading.heard == 0) continue;
    const auto [peer, is_new] = peers.emplace(*reading.peer, sign.last);
    peer->second = std::max(peer->second, sign.last);
  }
  // Not before: there may have been no memory for it.
  links_ = std::move(links);
  ticked_ = now;

  // Their messages are lost, and they may not know it.
  absl::flat_hash_set<WorkerRank> stale;
  const auto is_dead = [&](const Reading& reading) {
    const Sign& sign = links_[reading.link];
    if (reading.answers) return now - sign.pinged >= limit_ - interval();
    const bool was_open = reading.heard > 0 || reading.sent > 0;
    if (reading.is_bulk && was_open) return false;
    return now - sign.stuck >= (reading.is_bulk ? bulk_opening_ : limit_ - interval());
  };
  const auto delivers_nothing = [&](const Reading& reading) {
    const Sign& sign = links_[reading.link];
    return reading.is_bulk && now - sign.pinged_for_answer >= 2 * limit_ &&
           reading.main_answered >= sign.main_answered + kEnoughAnswers;
  };
  for (const Reading& reading : readings) {
    if (!reading.peer || reading.heard == 0 || !peers.contains(*reading.peer)) continue;
    if (is_dead(reading) || delivers_nothing(reading)) stale.insert(*reading.peer);
  }

  Verdict verdict;
  absl::flat_hash_set<WorkerRank> probed;
  for (size_t i = 0; i < readings.size(); ++i) {
    const Reading& reading = readings[i];
    Sign& sign = links_[reading.link];
    absl::Time last = sign.last;
    if (reading.peer && peers.contains(*reading.peer)) last = peers[*reading.peer];
    const absl::Duration silent = now - last;
    // On one of ours something waits while its peer is not known.
    const bool is_opening = !reading.peer && reading.heard == 0 && reading.answers;
    if (silent >= (is_opening ? bulk_opening_ : limit_ - interval())) {
      verdict.lost.push_back(i);
      continue;
    }
    // A peer that has not been heard lately may be lost: nothing says that it lives.
    if (reading.peer && silent < 2 * interval() &&
        (stale.contains(*reading.peer) || is_dead(reading))) {
      verdict.stale.push_back(i);
      continue;
    }
    if (!reading.peer) {
      // It may take longer than the limit to learn who that is, and what has come waits as long,
      // its pings among it: without one of ours the other end would hear nothing.
      if (reading.heard > 0) verdict.ask.push_back(i);
      continue;
    }
    const bool is_quiet = now - sign.last >= interval();
    const bool wants_answer =
        reading.is_bulk && reading.answers && now - sign.last_answer >= interval();
    if (is_quiet ? silent >= interval() || reading.answers : wants_answer) verdict.ask.push_back(i);
    if (wants_answer && sign.pinged_for_answer == absl::InfiniteFuture()) {
      sign.pinged_for_answer = now;
      sign.main_answered = reading.main_answered;
    }
    if (!is_quiet) continue;
    if (reading.answers) sign.pinged = std::min(sign.pinged, now);
    if (silent >= 2 * interval() && probed.insert(*reading.peer).second) {
      verdict.probe.push_back(*reading.peer);
    }
  }
  return verdict;
}

}  // namespace distgrad
