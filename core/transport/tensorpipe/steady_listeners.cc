// Wraps a transport so that an accepted connection which fails does not end its listener.
#include "core/transport/tensorpipe/steady_listeners.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/transport/tensorpipe/socket/peer_process.h"
#include "nop/structure.h"
#include "nop/types/variant.h"
#include "tensorpipe/common/nop.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"

namespace distgrad {
namespace {

using tensorpipe::AbstractNopHolder;
using tensorpipe::Error;

// What TensorPipe's listener reads first from each connection, as it declares it in a header that
// it does not install (tensorpipe/core/nop_types.h).
struct SpontaneousConnection {
  std::string context_name;
  NOP_STRUCTURE(SpontaneousConnection, context_name);
};
struct RequestedConnection {
  uint64_t registration_id;
  NOP_STRUCTURE(RequestedConnection, registration_id);
};
using Hello = nop::Variant<SpontaneousConnection, RequestedConnection>;

// Has `hello` say that the connection was requested under a number that TensorPipe, which counts
// from 0, never gives: it forgets such a connection. False if it is no Hello.
bool MakeUnwanted(AbstractNopHolder& hello) {
  tensorpipe::NopHolder<Hello> unwanted;
  unwanted.getObject() = RequestedConnection{std::numeric_limits<uint64_t>::max()};
  std::vector<uint8_t> bytes(unwanted.getSize());
  tensorpipe::NopWriter writer(bytes.data(), bytes.size());
  if (!unwanted.write(writer)) return false;
  tensorpipe::NopReader reader(bytes.data(), bytes.size());
  return static_cast<bool>(hello.read(reader));
}

// An accepted connection. Its first read is the listener's, which must not hear that it failed.
class AcceptedConnection final : public tensorpipe::transport::Connection, public HasPeerProcess {
 public:
  explicit AcceptedConnection(std::shared_ptr<tensorpipe::transport::Connection> connection)
      : connection_(std::move(connection)) {}

  void read(AbstractNopHolder& object, read_nop_callback_fn fn) override {
    if (std::exchange(read_before_, true)) return connection_->read(object, std::move(fn));
    // The listener keeps the object until the callback.
    connection_->read(object, [&object, fn = std::move(fn)](const Error& error) {
      fn(error && MakeUnwanted(object) ? Error() : error);
    });
  }

  void read(read_callback_fn fn) override { connection_->read(std::move(fn)); }
  void read(void* data, size_t size, read_callback_fn fn) override {
    connection_->read(data, size, std::move(fn));
  }
  void write(const void* data, size_t size, write_callback_fn fn) override {
    connection_->write(data, size, std::move(fn));
  }
  void write(const AbstractNopHolder& object, write_callback_fn fn) override {
    connection_->write(object, std::move(fn));
  }
  void setId(std::string id) override { connection_->setId(std::move(id)); }
  void close() override { connection_->close(); }
  pid_t PeerProcess() const override {
    const auto* knows = dynamic_cast<const HasPeerProcess*>(connection_.get());
    return knows == nullptr ? 0 : knows->PeerProcess();
  }

 private:
  const std::shared_ptr<tensorpipe::transport::Connection> connection_;
  bool read_before_ = false;  // by TensorPipe's loop only
};

class SteadyListener final : public tensorpipe::transport::Listener {
 public:
  explicit SteadyListener(std::shared_ptr<tensorpipe::transport::Listener> listener)
      : listener_(std::move(listener)) {}

  void accept(accept_callback_fn fn) override {
    listener_->accept(
        [fn = std::move(fn)](const Error& error,
                             std::shared_ptr<tensorpipe::transport::Connection> connection) {
          if (error) return fn(error, nullptr);
          fn(error, std::make_shared<AcceptedConnection>(std::move(connection)));
        });
  }
  std::string addr() const override { return listener_->addr(); }
  void setId(std::string id) override { listener_->setId(std::move(id)); }
  void close() override { listener_->close(); }

 private:
  const std::shared_ptr<tensorpipe::transport::Listener> listener_;
};

class SteadyTransport final : public tensorpipe::transport::Context {
 public:
  explicit SteadyTransport(std::shared_ptr<tensorpipe::transport::Context> transport)
      : transport_(std::move(transport)) {}

  std::shared_ptr<tensorpipe::transport::Connection> connect(std::string address) override {
    return transport_->connect(std::move(address));
  }
  std::shared_ptr<tensorpipe::transport::Listener> listen(std::string address) override {
    return std::make_shared<SteadyListener>(transport_->listen(std::move(address)));
  }
  bool isViable() const override { return transport_->isViable(); }
  const std::string& domainDescriptor() const override { return transport_->domainDescriptor(); }
  bool canCommunicateWithRemote(const std::string& descriptor) const override {
    return transport_->canCommunicateWithRemote(descriptor);
  }
  void setId(std::string id) override { transport_->setId(std::move(id)); }
  void close() override { transport_->close(); }
  void join() override { transport_->join(); }

 private:
  const std::shared_ptr<tensorpipe::transport::Context> transport_;
};

}  // namespace

std::shared_ptr<tensorpipe::transport::Context> WithSteadyListeners(
    std::shared_ptr<tensorpipe::transport::Context> transport) {
  return std::make_shared<SteadyTransport>(std::move(transport));
}

}  // namespace distgrad
