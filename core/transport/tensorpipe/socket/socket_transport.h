// A transport of our own for TensorPipe, over Unix-domain and TCP sockets. TensorPipe's pipes and
// channels work over it as over its own transports, which it is meant to replace: it takes one
// system call for a message each way, sleeps when there is nothing to do, and reads nothing from a
// client that has not proved in a handshake that it belongs here (see handshake.h).
//
// A listener waits on a TCP port and on a Unix-domain socket at once; its address (endpoint.h)
// names both. An end that connects takes the Unix-domain socket if it can: on the same machine, as
// the same user.
//
// docs/security.md says what is defended, and what isn't.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "core/net/loop.h"
#include "core/transport/tensorpipe/socket/socket_options.h"
#include "tensorpipe/transport/context.h"

namespace distgrad {

// Makes the transport, on a loop of its own, which it ends. kInvalidArgument for a bad key. Its
// listen() takes a numeric host without a port, and throws std::runtime_error where it cannot
// listen.
absl::StatusOr<std::shared_ptr<tensorpipe::transport::Context>> NewSocketTransport(
    std::shared_ptr<Loop> loop, SocketOptions options);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_TRANSPORT_H_
