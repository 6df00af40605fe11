// The client of a store that is served over TCP: by worker 0 (store_server.h), or by torchrun's
// agent with c10d's TCPStore. The protocol: tcp_store_protocol.h.
#ifndef DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_
#define DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "core/rpc/store.h"
#include "core/rpc/store/socket.h"

namespace distgrad {

struct TcpStoreClientOptions {
  std::string host;
  uint16_t port = 0;
  // With none (it may be "") the server is c10d's, and there is no handshake.
  std::optional<std::string> cluster_key;
  Resolver resolver;
  // How long the server may take for one answer before the client tries another connection.
  absl::Duration answer_timeout;
};

// Thread-safe.
//
// It survives the loss of its connection and a server that is silent for a while: it connects
// again and repeats the request for as long as its caller has time. Only when nobody listens at
// the server's address any more, or when the server has forgotten this client, is the store lost.
class TcpStoreClient final : public Store {
 public:
  static absl::StatusOr<std::unique_ptr<TcpStoreClient>> Connect(TcpStoreClientOptions options,
                                                                 Deadline deadline);

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, Deadline deadline) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override;

 private:
  // Whether the server may get a request twice. All may, but for additions to c10d's counters.
  enum class Repeat { kAllowed, kForbidden };
  using ReadAnswer = absl::FunctionRef<absl::Status(Socket&, Deadline deadline)>;

  explicit TcpStoreClient(TcpStoreClientOptions options);

  // Sends the request and reads what answers it, when nobody else does.
  absl::Status Exchange(const std::string& request, Deadline deadline, Repeat repeat,
                        ReadAnswer read_answer);
  // The same for the one who has set busy_. Sets *gone if the store is lost for good.
  absl::Status ExchangeAlone(const std::string& request, Deadline deadline, Repeat repeat,
                             ReadAnswer read_answer, bool* gone);
  absl::StatusOr<Socket> ConnectOnce(Deadline deadline);
  absl::Status BeginSession(Socket& socket, Deadline deadline);
  absl::StatusOr<bool> Check(const std::string& key, Deadline deadline);
  absl::StatusOr<std::string> Fetch(const std::string& key, Deadline deadline);

  // Constant after construction.
  const TcpStoreClientOptions options_;
  const std::string where_;
  const uint64_t session_;

  std::mutex mu_;  // not absl::Mutex, whose timed waits follow the wall clock
  std::condition_variable free_;
  // Guarded by mu_.
  bool busy_ = false;  // somebody uses the connection
  absl::Status gone_;

  std::atomic<uint64_t> additions_{0};

  // Of whoever has set busy_.
  Socket socket_;       // invalid between two connections
  bool known_ = false;  // the server has heard of this session
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_
