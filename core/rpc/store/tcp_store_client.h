// The client of a store that is served over TCP: by worker 0 (store_server.h), or by torchrun's
// agent with c10d's TCPStore. The protocol: tcp_store_protocol.h.
#ifndef DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_
#define DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "core/rpc/store.h"
#include "core/rpc/store/socket.h"

namespace distgrad {

// Thread-safe. After an error other than a key's, it stays broken.
class TcpStoreClient final : public Store {
 public:
  // With no `cluster_key` (which may be "") it is c10d's, and there is no handshake.
  static absl::StatusOr<std::unique_ptr<TcpStoreClient>> Connect(
      const std::string& host, uint16_t port, const std::optional<std::string>& cluster_key,
      absl::Time deadline, const Resolver& resolver);

  TcpStoreClient(Socket socket, std::string where)
      : where_(std::move(where)), socket_(std::move(socket)) {}

  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override;

 private:
  // One at a time: sends the request and reads what answers it.
  absl::Status Exchange(const std::string& request, absl::Time deadline,
                        absl::FunctionRef<absl::Status(Socket&)> read_answer);
  absl::StatusOr<bool> Check(const std::string& key, absl::Time deadline);
  absl::StatusOr<std::string> Fetch(const std::string& key, absl::Time deadline);

  // Constant after construction.
  const std::string where_;

  absl::Mutex mu_;
  bool busy_ ABSL_GUARDED_BY(mu_) = false;  // somebody uses the socket
  absl::Status broken_ ABSL_GUARDED_BY(mu_);

  Socket socket_;  // of whoever has set busy_
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_RPC_STORE_TCP_STORE_CLIENT_H_
