// The limits of what other workers, and its own program, can make a worker hold. Past one of these
// a call fails with kResourceExhausted and the name of the limit, and nothing is allocated for it.
#ifndef DISTGRAD_CORE_RPC_LIMITS_H_
#define DISTGRAD_CORE_RPC_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"

namespace distgrad {

struct Limits {
  // The size of one message with its tensors, and of what one operator that a peer calls allocates.
  uint64_t message_bytes = uint64_t{8} << 30;
  uint32_t tensors_per_message = 1 << 14;

  // Calls in flight to one peer, and of one peer that are served here; and of all of them together.
  size_t calls_per_peer = 4096;
  size_t calls = 65536;

  // Bytes that wait to be sent to one peer; and bytes of one peer's calls that are served here. One
  // message may be larger, when it is alone.
  uint64_t bytes_per_peer = uint64_t{4} << 30;

  // Contexts of one origin that are open here.
  size_t contexts_per_peer = 4096;

  // Connections whose handshake is not finished, and how long each may take for it ("socket"). The
  // peer has as long to close a connection that is refused or given up.
  size_t unauthenticated = 256;
  absl::Duration handshake_timeout = absl::Seconds(10);
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_LIMITS_H_
