// Logs the clients that a listener does not let in.
#ifndef DISTGRAD_CORE_NET_REFUSAL_LOG_H_
#define DISTGRAD_CORE_NET_REFUSAL_LOG_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/net/handshake.h"

namespace distgrad {

// Returns whether to log an event that any client can cause: the first, the second, the fourth and
// so on, lest the log fill.
inline bool IsWorthALine(uint64_t count) { return (count & (count - 1)) == 0; }

// Used by one thread.
class RefusalLog {
 public:
  // "the job's store", for instance.
  explicit RefusalLog(std::string to) : to_(std::move(to)) {}

  // Logs that the connection `fd` is about to be closed for that reason, before its handshake was
  // over. A warning, with its address, where it speaks our protocol and its handshake has failed:
  // then it is a worker with another cluster key, or of another job, more often than an attacker.
  void Add(int fd, const Handshake& handshake, const absl::Status& why);

 private:
  const std::string to_;
  uint64_t count_ = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_REFUSAL_LOG_H_
