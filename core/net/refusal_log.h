// Logs the clients that a listener does not let in.
#ifndef DISTGRAD_CORE_NET_REFUSAL_LOG_H_
#define DISTGRAD_CORE_NET_REFUSAL_LOG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/net/handshake.h"

namespace distgrad {

// Returns whether to log an event that any client can cause: the first, the second, the fourth and
// so on, lest the log fill.
inline bool IsWorthALine(uint64_t count) { return (count & (count - 1)) == 0; }

// Used by one thread.
class RefusalLog {
 public:
  // `to`: "the job's store", for instance. `now` is for tests.
  explicit RefusalLog(std::string to, std::function<absl::Time()> now = &absl::Now)
      : to_(std::move(to)), now_(std::move(now)) {}

  // Logs that the connection `fd` is about to be closed for that reason, before its handshake was
  // over. A warning, with its address, where it speaks our protocol and its handshake has failed:
  // then it is a worker with another cluster key, or of another job, more often than an attacker.
  //
  // Those of one address for one reason have a line for the first, the second, the fourth and so
  // on, and each ten minutes: so neither does a client fill the log, nor one that goes on for days
  // hide from it what a late worker does wrong. Beyond 64 addresses and reasons all others count
  // together.
  void Add(int fd, const Handshake& handshake, const absl::Status& why);

 private:
  struct Kind {
    uint64_t count = 0;
    absl::Time last_line = absl::InfinitePast();
  };

  const std::string to_;
  const std::function<absl::Time()> now_;
  std::map<std::pair<std::string, std::string>, Kind> kinds_;  // by address and reason
  Kind others_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_REFUSAL_LOG_H_
