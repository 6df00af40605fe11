// Makes the connections and listeners that TensorPipe asks for.
#include "core/transport/tensorpipe/socket/socket_transport.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/net/cluster_key.h"
#include "core/net/endpoint.h"
#include "core/net/loop.h"
#include "core/transport/tensorpipe/socket/peer_process.h"
#include "core/transport/tensorpipe/socket/socket_connection.h"
#include "core/transport/tensorpipe/socket/socket_listener.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"

namespace distgrad {
namespace {

using tensorpipe::AbstractNopHolder;

// Returns what calls TensorPipe's `fn`, and ends the process where that throws: it has found no
// memory in the middle of something, and its executor takes this thread for the one that runs what
// is handed in, for good (tensorpipe/common/deferred_executor.h). The transport would stand still.
template <typename... Arguments>
std::function<void(Arguments...)> Whole(std::function<void(Arguments...)> fn) {
  return [fn = std::move(fn)](Arguments... arguments) noexcept { fn(arguments...); };
}

// What TensorPipe holds: it may let go without closing.
class ConnectionHandle final : public tensorpipe::transport::Connection, public HasPeerProcess {
 public:
  explicit ConnectionHandle(std::shared_ptr<SocketConnection> connection)
      : connection_(std::move(connection)) {}
  ~ConnectionHandle() override { connection_->Close(); }

  void read(read_callback_fn fn) override { connection_->Read(nullptr, 0, Whole(std::move(fn))); }
  void read(void* data, size_t size, read_callback_fn fn) override {
    connection_->Read(data, size, Whole(std::move(fn)));
  }
  void read(AbstractNopHolder& object, read_nop_callback_fn fn) override {
    connection_->Read(&object, Whole(std::move(fn)));
  }
  void write(const void* data, size_t size, write_callback_fn fn) override {
    connection_->Write(data, size, Whole(std::move(fn)));
  }
  void write(const AbstractNopHolder& object, write_callback_fn fn) override {
    connection_->Write(object, Whole(std::move(fn)));
  }
  void setId(std::string) override {}
  void close() override { connection_->Close(); }
  pid_t PeerProcess() const override { return connection_->PeerProcess(); }

 private:
  const std::shared_ptr<SocketConnection> connection_;
};

class ListenerHandle final : public tensorpipe::transport::Listener {
 public:
  explicit ListenerHandle(std::shared_ptr<SocketListener> listener)
      : listener_(std::move(listener)) {}
  ~ListenerHandle() override { listener_->Close(); }

  void accept(accept_callback_fn fn) override {
    listener_->Accept([fn = Whole(std::move(fn))](const tensorpipe::Error& error,
                                                  std::shared_ptr<SocketConnection> connection) {
      std::shared_ptr<ConnectionHandle> handle;
      if (!error) handle = std::make_shared<ConnectionHandle>(std::move(connection));
      fn(error, std::move(handle));
    });
  }
  std::string addr() const override { return listener_->address(); }
  void setId(std::string) override {}
  void close() override { listener_->Close(); }

 private:
  const std::shared_ptr<SocketListener> listener_;
};

class SocketTransport final : public tensorpipe::transport::Context {
 public:
  SocketTransport(std::shared_ptr<Loop> loop, SocketOptions options)
      : loop_(std::move(loop)), options_(std::move(options)) {}

  // TensorPipe connects to addresses that a peer has told it, too.
  std::shared_ptr<tensorpipe::transport::Connection> connect(std::string address) override {
    auto endpoint = ParseEndpoint(address);
    return std::make_shared<ConnectionHandle>(
        endpoint.ok() ? SocketConnection::Connect(loop_, *std::move(endpoint), options_)
                      : SocketConnection::Failed(loop_, endpoint.status().message()));
  }

  std::shared_ptr<tensorpipe::transport::Listener> listen(std::string host) override {
    auto listener = SocketListener::Listen(loop_, host, options_);
    if (!listener.ok()) throw std::runtime_error(std::string(listener.status().message()));
    return std::make_shared<ListenerHandle>(*std::move(listener));
  }

  bool isViable() const override { return true; }
  const std::string& domainDescriptor() const override { return domain_; }
  void setId(std::string) override {}
  void close() override { loop_->Close(); }
  void join() override {
    loop_->Close();
    loop_->Join();
  }

 private:
  const std::shared_ptr<Loop> loop_;
  const SocketOptions options_;
  const std::string domain_ = "distgrad socket 1";
};

}  // namespace

absl::StatusOr<std::shared_ptr<tensorpipe::transport::Context>> NewSocketTransport(
    std::shared_ptr<Loop> loop, SocketOptions options) {
  DG_RETURN_IF_ERROR(CheckClusterKey(options.key));
  return std::make_shared<SocketTransport>(std::move(loop), std::move(options));
}

}  // namespace distgrad
