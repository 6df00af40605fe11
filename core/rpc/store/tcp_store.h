// A store that one process serves to all others over TCP: c10d's TCPStore, which torchrun's
// agent serves too.
//
// The server is libtorch's; the client is ours and speaks its protocol, because libtorch's waits
// for ever on a server that does not answer, holds its lock meanwhile, and prints a stack trace
// for each failure.
#ifndef DISTGRAD_CORE_RPC_STORE_TCP_STORE_H_
#define DISTGRAD_CORE_RPC_STORE_TCP_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/rpc/store.h"

namespace distgrad {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";  // a name or a number; where clients find the server
  uint16_t port = 0;               // 0: any free one (for the server only)

  // Serve the store as well, on `bind_host` (default: `host`); "0.0.0.0" or "::" is every
  // address of this machine.
  bool is_server = false;
  std::string bind_host = {};

  // By when the server must have answered.
  absl::Time deadline = absl::InfiniteFuture();
};

class TcpStore : public Store {
 public:
  virtual uint16_t port() const = 0;
};

// A client tries until the deadline, also while the host's name is not known yet; then
// kDeadlineExceeded with the last reason. A server: kAlreadyExists if the port is taken,
// kInvalidArgument if the host is not one of this machine's. The server ends with its store,
// and then its clients get kUnavailable.
absl::StatusOr<std::unique_ptr<TcpStore>> NewTcpStore(const TcpStoreOptions& options);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_STORE_TCP_STORE_H_
