// Joins server and client: starts the one where it is due, and opens the other.
#include "core/membership/store/tcp_store.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/membership/backoff.h"
#include "core/membership/store/store_server.h"
#include "core/membership/store/tcp_store_client.h"
#include "core/net/socket.h"

namespace distgrad {
namespace {

class TcpStoreImpl final : public TcpStore {
 public:
  TcpStoreImpl(std::unique_ptr<StoreServer> server, std::unique_ptr<TcpStoreClient> client,
               uint16_t port)
      : port_(port), server_(std::move(server)), client_(std::move(client)) {}

  absl::Status Set(const std::string& key, const std::string& value, Deadline deadline) override {
    return client_->Set(key, value, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount, Deadline deadline) override {
    return client_->Add(key, amount, deadline);
  }
  absl::Status Delete(const std::string& key, Deadline deadline) override {
    return client_->Delete(key, deadline);
  }
  absl::StatusOr<std::vector<Value>> GetEach(Keys keys, Deadline deadline) override {
    return client_->GetEach(keys, deadline);
  }
  absl::StatusOr<std::vector<Value>> AwaitChange(Keys keys, absl::Span<const Value> seen,
                                                 Deadline deadline) override {
    return client_->AwaitChange(keys, seen, deadline);
  }
  uint16_t port() const override { return port_; }

 private:
  // Constant after construction. The client goes first.
  const uint16_t port_;
  const std::unique_ptr<StoreServer> server_;  // nullptr if another process is it
  const std::unique_ptr<TcpStoreClient> client_;
};

// A cluster's name server may learn a host's name only when its first process runs.
absl::StatusOr<Socket> Listen(const std::string& host, const TcpStoreOptions& options) {
  Backoff backoff(options.deadline);
  for (;;) {
    const absl::StatusOr<std::string> known = options.resolver(host);
    absl::StatusOr<Socket> socket =
        known.ok() ? Socket::Listen(*known, options.port) : absl::StatusOr<Socket>(known.status());
    if (!absl::IsUnavailable(socket.status())) return socket;
    if (!backoff.Sleep()) return absl::DeadlineExceededError(socket.status().message());
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStore>> NewTcpStore(const TcpStoreOptions& options) {
  std::unique_ptr<StoreServer> server;
  uint16_t port = options.port;
  std::string host = options.host;
  if (options.is_server) {
    if (!options.bind_host.empty()) host = options.bind_host;
    DG_ASSIGN_OR_RETURN(Socket listener, Listen(host, options));
    DG_ASSIGN_OR_RETURN(port, listener.LocalPort());
    DG_ASSIGN_OR_RETURN(
        server, StoreServer::Start(std::move(listener), {.cluster_key = options.cluster_key,
                                                         .certificates = options.certificates}));
  } else if (port == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the port of the store at ", host, " is 0"));
  }
  std::optional<ClusterKey> cluster_key = options.cluster_key;
  if (options.of_launcher) cluster_key.reset();
  DG_ASSIGN_OR_RETURN(std::unique_ptr<TcpStoreClient> client,
                      TcpStoreClient::Connect({.host = host,
                                               .port = port,
                                               .cluster_key = cluster_key,
                                               .certificates = options.certificates,
                                               .resolver = options.resolver,
                                               .answer_timeout = options.answer_timeout},
                                              options.deadline));
  return std::make_unique<TcpStoreImpl>(std::move(server), std::move(client), port);
}

}  // namespace distgrad
