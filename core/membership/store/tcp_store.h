// A store that one process serves to all others over TCP: worker 0 (store_server.h), or torchrun's
// agent with c10d's TCPStore.
//
// The client is ours for both, because libtorch's waits for ever on a server that does not answer,
// holds its lock meanwhile, and prints a stack trace for each failure.
#ifndef DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_H_
#define DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/membership/store.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/socket.h"

namespace distgrad {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";  // a name or a number; where clients find the server
  uint16_t port = 0;               // 0: any free one (for the server only)

  // The secret that both ends prove to each other before anything else is said; "": none. And what
  // they show each other in TLS; null: none. The store of a launcher knows nothing of either.
  ClusterKey cluster_key = {};
  std::shared_ptr<Certificates> certificates = nullptr;
  bool of_launcher = false;

  // Serve the store as well, on `bind_host` (default: `host`); "0.0.0.0" or "::" is every
  // address of this machine.
  bool is_server = false;
  std::string bind_host = {};

  // Called before each attempt to connect or to listen.
  Resolver resolver = [](const std::string& host) { return host; };

  // The time by which the server must have answered.
  Deadline deadline = Deadline::Never();

  // The time that the server may take for an answer later on, before a client tries another
  // connection.
  absl::Duration answer_timeout = absl::Seconds(5);
};

class TcpStore : public Store {
 public:
  virtual uint16_t port() const = 0;
};

// Starts a server or connects a client. Both try until the deadline while the host's name is not
// known yet, and a client also while nothing answers; then kDeadlineExceeded with the last reason.
// kUnauthenticated if one end has a cluster key and the other has none, or another one; kInternal,
// at once too, if OpenSSL fails in this process. A server:
// kAlreadyExists if the port is taken, kInvalidArgument if the host is not one of this machine's.
// The server ends with its store, and then its clients get kUnavailable. While it is silent, or
// cannot be reached, they wait and connect again.
absl::StatusOr<std::unique_ptr<TcpStore>> NewTcpStore(const TcpStoreOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_STORE_TCP_STORE_H_
