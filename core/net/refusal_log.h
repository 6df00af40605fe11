// Logs the clients that a listener does not let in.
#ifndef DISTGRAD_CORE_NET_REFUSAL_LOG_H_
#define DISTGRAD_CORE_NET_REFUSAL_LOG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
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
  // Those of one address for one kind of reason have a line for the first, the second, the fourth
  // and so on, and each ten minutes: so neither does a client fill the log, nor one that goes on
  // for days hide from it what a late worker does wrong. What a client may write into a reason, a
  // number or a name, makes no other kind. Of 64 addresses; of more, all others count as one, until
  // one of the 64 has been silent for ten minutes.
  void Add(int fd, const Handshake& handshake, const absl::Status& why);
  // The same of a client at that address.
  void Add(absl::string_view address, const Handshake& handshake, const absl::Status& why);

 private:
  struct Kind {
    uint64_t count = 0;
    absl::Time last_line = absl::InfinitePast();
  };
  struct Client {
    absl::Time last;  // when it was refused
    std::map<std::string, Kind, std::less<>> kinds;
  };

  // Returns that of the address, or others_ where there is no place for one more.
  Client& Find(absl::string_view address, absl::Time now);

  const std::string to_;
  const std::function<absl::Time()> now_;
  std::map<std::string, Client, std::less<>> clients_;  // by address
  Client others_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_REFUSAL_LOG_H_
