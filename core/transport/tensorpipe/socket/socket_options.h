// The options by which a transport's sockets prove that they belong to the job, and how long they
// may take.
#ifndef DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_OPTIONS_H_
#define DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_OPTIONS_H_

#include <cstddef>
#include <memory>

#include "absl/time/time.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"

namespace distgrad {

struct SocketOptions {
  // Whether what follows this handshake is encrypted.
  bool Encrypts(const Handshake& handshake, bool is_unix) const {
    if (key.empty() && certificates == nullptr) return false;
    return !is_unix || handshake.encrypts_unix();
  }

  // The cluster key (cluster_key.h), with which TCP is encrypted; empty: a client that knows a
  // listener's address may connect, and nothing is.
  ClusterKey key;

  // What each end shows the other in TLS, and knows it by, in the place of the cluster key's
  // secret; null: none.
  std::shared_ptr<Certificates> certificates = nullptr;

  // Whether processes of one user that share a machine use Unix-domain sockets, which are faster,
  // and not encrypted unless that is asked for.
  bool unix_sockets = true;
  // Whether these are encrypted, too. It is enough that one end says so.
  bool encrypts_unix = false;

  // The time to connect and to finish the handshake, at both ends.
  absl::Duration handshake_timeout = absl::Seconds(10);

  // How long the other end of an open connection may take to acknowledge bytes, or leave those that
  // wait where they are; TCP only. Infinite: as long as the system lets it.
  absl::Duration acknowledge_timeout = absl::InfiniteDuration();

  // Connections of a listener that have not finished their handshake. For one more the oldest is
  // closed, after a hundredth of `handshake_timeout` or a second: so clients that connect and say
  // nothing keep no other out.
  size_t max_unauthenticated = 256;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_TRANSPORT_TENSORPIPE_SOCKET_SOCKET_OPTIONS_H_
