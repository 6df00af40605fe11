#include "core/rpc/tensorpipe/steady_listeners.h"

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "core/rpc/tensorpipe/socket/peer_process.h"
#include "tensorpipe/transport/connection.h"
#include "tensorpipe/transport/listener.h"

namespace distgrad {
namespace {

using tensorpipe::AbstractNopHolder;
using tensorpipe::Error;

// An accepted connection. Its first read is the listener's; if it fails, the callback is kept
// back until the listener, which keeps this connection meanwhile, closes it.
class AcceptedConnection final : public tensorpipe::transport::Connection,
                                 public HasPeerProcess,
                                 public std::enable_shared_from_this<AcceptedConnection> {
 public:
  explicit AcceptedConnection(std::shared_ptr<tensorpipe::transport::Connection> connection)
      : connection_(std::move(connection)) {}

  void read(AbstractNopHolder& object, read_nop_callback_fn fn) override {
    if (std::exchange(read_before_, true)) return connection_->read(object, std::move(fn));
    connection_->read(object, [watch = weak_from_this(), fn = std::move(fn)](const Error& error) {
      const auto self = watch.lock();
      if (!error || self == nullptr || !self->KeepBack(fn, error)) fn(error);
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
  pid_t PeerProcess() const override {
    const auto* knows = dynamic_cast<const HasPeerProcess*>(connection_.get());
    return knows == nullptr ? 0 : knows->PeerProcess();
  }
  void close() override {
    connection_->close();
    read_nop_callback_fn kept;
    Error error;
    {
      absl::MutexLock lock(&mu_);
      closed_ = true;
      kept = std::exchange(kept_, nullptr);
      error = error_;
    }
    if (kept) kept(error);
  }

 private:
  // False if we are closed already.
  bool KeepBack(const read_nop_callback_fn& fn, const Error& error) {
    {
      absl::MutexLock lock(&mu_);
      if (closed_) return false;
      kept_ = fn;
      error_ = error;
    }
    connection_->close();
    return true;
  }

  const std::shared_ptr<tensorpipe::transport::Connection> connection_;
  bool read_before_ = false;  // by TensorPipe's loop only

  absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  read_nop_callback_fn kept_ ABSL_GUARDED_BY(mu_);
  Error error_ ABSL_GUARDED_BY(mu_);
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
