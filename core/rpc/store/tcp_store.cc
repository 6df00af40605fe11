#include "core/rpc/store/tcp_store.h"

#include <chrono>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "core/base/status.h"
#include "core/rpc/store/socket.h"
#include "core/rpc/store/tcp_store_client.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace distgrad {
namespace {

using Server = c10::intrusive_ptr<c10d::TCPStore>;

class TcpStoreImpl final : public TcpStore {
 public:
  TcpStoreImpl(Server server, std::unique_ptr<TcpStoreClient> client, uint16_t port)
      : port_(port), server_(std::move(server)), client_(std::move(client)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    return client_->Set(key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Time deadline) override {
    return client_->Get(key, deadline);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t amount) override {
    return client_->Add(key, amount);
  }
  uint16_t port() const override { return port_; }

 private:
  // Constant after construction. The client goes first.
  const uint16_t port_;
  const Server server_;  // nullptr if another process is it
  const std::unique_ptr<TcpStoreClient> client_;
};

// Serves on a socket of ours: so its errors are ours to tell, and it binds no more than asked.
absl::StatusOr<Server> Serve(const TcpStoreOptions& options, uint16_t* port) {
  const std::string& host = options.bind_host.empty() ? options.host : options.bind_host;
  DG_ASSIGN_OR_RETURN(Socket socket, Socket::Listen(host, options.port));
  DG_ASSIGN_OR_RETURN(*port, socket.LocalPort());
  c10d::TCPStoreOptions server;
  server.isServer = true;
  server.port = *port;
  server.waitWorkers = false;
  server.timeout = std::chrono::seconds(30);
  server.masterListenFd = socket.Release();
  try {
    // Its own client, of which we make no use, finds it there.
    return c10::make_intrusive<c10d::TCPStore>(host, server);
  } catch (const c10::Error& e) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve a store on port ", *port, ": ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve a store on port ", *port, ": ", e.what()));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStore>> NewTcpStore(const TcpStoreOptions& options) {
  Server server;
  uint16_t port = options.port;
  if (options.is_server) {
    DG_ASSIGN_OR_RETURN(server, Serve(options, &port));
  } else if (port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the port of the store at ", options.host, " is 0"));
  }
  const bool elsewhere = options.is_server && !options.bind_host.empty();
  DG_ASSIGN_OR_RETURN(std::unique_ptr<TcpStoreClient> client,
                      TcpStoreClient::Connect(elsewhere ? options.bind_host : options.host, port,
                                              options.deadline));
  return std::make_unique<TcpStoreImpl>(std::move(server), std::move(client), port);
}

}  // namespace distgrad
