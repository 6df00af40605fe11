// A transport of our own for TensorPipe, over Unix-domain and TCP sockets. TensorPipe's pipes and
// channels work over it as over its own transports, which it is meant to replace: it takes one
// system call for a message each way, sleeps when there is nothing to do, and reads nothing from
// anybody who has not proved in a handshake that he belongs here (see handshake.h).
//
// A listener waits on a TCP port and on a Unix-domain socket at once; its address (endpoint.h)
// names both. Who connects takes the Unix-domain socket if it can: the same machine and user.
//
// docs/security.md says what is defended, and what isn't.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/net/loop.h"
#include "tensorpipe/transport/context.h"

namespace distgrad {

struct SocketOptions {
  // The cluster key (cluster_key.h); empty: whoever knows a listener's address may connect.
  std::string key;

  // To connect and to finish the handshake, at both ends.
  absl::Duration handshake_timeout = absl::Seconds(10);

  // Connections of a listener that have not finished their handshake. For one more the oldest is
  // closed, after a tenth of a second: so strangers who connect and say nothing keep nobody out.
  size_t max_unauthenticated = 256;
};

// On a loop of its own, which it ends. kInvalidArgument for a bad key. Its listen() takes a numeric
// host without a port, and throws std::runtime_error where it cannot listen.
absl::StatusOr<std::shared_ptr<tensorpipe::transport::Context>> NewSocketTransport(
    std::shared_ptr<Loop> loop, SocketOptions options);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_
