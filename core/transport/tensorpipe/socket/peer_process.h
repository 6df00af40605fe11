// A connection of TensorPipe's transports that knows the process at its other end, and can read
// what there is no memory for.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_PEER_PROCESS_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_PEER_PROCESS_H_

#include <sys/types.h>

namespace distgrad {

// What is read to there is dropped. Ours only: by the sockets' connections and the channel `cma`.
inline void* DiscardTarget() {
  static char none;
  return &none;
}

// Thread-safe.
class HasPeerProcess {
 public:
  virtual ~HasPeerProcess() = default;
  // The process that the kernel names; 0 where the connection does not stand (yet), or is none over
  // a Unix-domain socket.
  virtual pid_t PeerProcess() const = 0;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_PEER_PROCESS_H_
