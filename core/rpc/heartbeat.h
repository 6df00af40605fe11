// Decides from what is heard on each link which peers are silent, which are to be pinged, and which
// are lost. It has no clock and sends nothing: its owner calls Tick() now and then.
//
// A peer lives as long as anything arrives from it, on whichever link. A ping waits behind what is
// to be sent on a link before it: so a peer that stays silent for long is pinged on a new link, a
// probe, before it is given up.
//
// A link may be dead though its peer lives: the other end has given it up, and the news of that was
// lost. So each is pinged by itself, when nothing waits on it before the ping. One that brings no
// answer is stale; and so are all links of its peer, which learns only by their end that what it
// waits for is lost. (A link on which nothing ever came has lost nothing, and goes alone.)
//
// Nor can a link be pinged on which something waits to leave, which may be for good: it was never
// opened, or the other end takes nothing. So one that gets rid of no packet is stale, too. Large
// packets may take longer than the limit; there the system has to notice it, which counts bytes.
// And with a link for large packets the one ends that it belongs to: so until it is open it has as
// long as transports have for that, where that is longer; and so has one that was accepted, and may
// be for large packets, until its hello.
//
// What comes on a link for large packets does not say whether what is sent there arrives: the
// answers to its pings come on the link that it belongs to. So each end counts these by themselves.
// In the buffers of the system the end of a large packet may be before a ping: so there it has
// twice the limit. And many small packets of the peer's may be before an answer: so that link is
// pinged at the same time, and while its own answers do not come nothing follows.
#ifndef DISTGRAD_CORE_RPC_HEARTBEAT_H_
#define DISTGRAD_CORE_RPC_HEARTBEAT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "core/base/ids.h"

namespace distgrad {

// Used by one thread at a time.
class Heartbeat {
 public:
  // A link, and how many packets have come, and have left, on it so far.
  struct Reading {
    uint64_t link = 0;                    // any number of its own
    std::optional<WorkerRank> peer = {};  // not known before its hello
    uint64_t heard = 0, sent = 0;
    // Whether a ping that is sent now is answered, and with nothing before it. If not, something
    // waits to leave.
    bool answers = false;
    // Whether it carries large packets. One may come before a ping that was to have nothing before
    // it: so while one is being sent, no answer is expected.
    bool is_bulk = false;
    // Of one that does: how many of its pings have been answered, and how many of those of the link
    // that it belongs to, which is to be pinged whenever this one is.
    uint64_t answered = 0, main_answered = 0;
  };
  // What is to be done; links by their place in the readings.
  struct Verdict {
    std::vector<size_t> ask;        // are to be pinged
    std::vector<WorkerRank> probe;  // ping these on a second link, too
    std::vector<size_t> lost;
    std::vector<size_t> stale;  // though their peers live
  };

  // A peer that is silent is lost within `limit`, and not before 3/5 of it. `opening`: how long a
  // link for large packets may take to open, at either end.
  explicit Heartbeat(absl::Duration limit, absl::Duration opening = absl::ZeroDuration())
      : limit_(limit), bulk_opening_(std::max(opening, limit - limit / 5)) {}

  // Returns how often to call Tick(); InfiniteDuration() for never.
  absl::Duration interval() const { return limit_ / 5; }
  absl::Duration limit() const { return limit_; }

  // Takes the readings of all links. A tick that comes late says that this process slept, and knows
  // nothing of others: all get a new start.
  Verdict Tick(absl::Time now, const std::vector<Reading>& readings);

 private:
  struct Sign {
    uint64_t heard = 0, sent = 0, answered = 0;
    absl::Time last;         // when it was heard
    absl::Time last_answer;  // when a ping was answered last, if it is a bulk link
    // When it was pinged first since then, with nothing before the ping.
    absl::Time pinged = absl::InfiniteFuture(), pinged_for_answer = absl::InfiniteFuture();
    uint64_t main_answered = 0;  // at `pinged_for_answer`
    // Since when something waits to leave, and nothing leaves nor is heard.
    absl::Time stuck = absl::InfiniteFuture();
  };

  const absl::Duration limit_, bulk_opening_;
  absl::Time ticked_ = absl::InfinitePast();
  absl::flat_hash_map<uint64_t, Sign> links_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_HEARTBEAT_H_
