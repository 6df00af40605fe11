// TCP sockets, with or without TLS, whose every wait ends at a deadline, and whose every failure is
// a Status.
#ifndef DISTGRAD_CORE_NET_SOCKET_H_
#define DISTGRAD_CORE_NET_SOCKET_H_

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/deadline.h"
#include "core/net/certificates.h"
#include "core/net/handshake.h"
#include "core/net/tls.h"

namespace distgrad {

// Says of a host's name what to look up in its stead: its number, or the name itself, which the
// machine then looks up. kUnavailable where it is not known (yet).
using Resolver = std::function<absl::StatusOr<std::string>(const std::string& host)>;

// What is left, for poll(): rounded up, so that a loop does not spin at the end; at most a minute.
int PollMilliseconds(Deadline deadline);

// Owns a file descriptor. For one thread at a time.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), tls_(std::move(other.tls_)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(tls_, other.tls_);
    return *this;
  }
  ~Socket();

  // Tries each address of the host once. kFailedPrecondition if the host says that nothing listens
  // there; kUnavailable if the name is unknown or the host cannot be reached.
  static absl::StatusOr<Socket> Connect(const std::string& host, uint16_t port, Deadline deadline);

  struct Address {
    sockaddr_storage storage;
    socklen_t size;
  };
  // The first of these that answers ("Happy Eyeballs", RFC 8305): each has a head start of a
  // quarter of a second before the next, so one that is silent does not use up the time.
  static absl::StatusOr<Socket> ConnectToAny(const std::vector<Address>& addresses,
                                             Deadline deadline);

  // kAlreadyExists if the port is taken; kUnavailable if the host's name is unknown, which may
  // change; kInvalidArgument if the host is not of this machine.
  static absl::StatusOr<Socket> Listen(const std::string& host, uint16_t port);

  // Encrypts all that follows, once the other end does so too. The handshake is done. By
  // certificates kUnauthenticated if the other end refuses this one's, kPermissionDenied if what it
  // says is not what one that is accepted here says: its own is refused, it does not use any, or it
  // has not shaken hands. kUnavailable if the connection ends meanwhile, which says nothing of
  // either; and without certificates for what arrives changed, too.
  absl::Status StartTls(const Handshake& handshake,
                        const std::shared_ptr<Certificates>& certificates, Deadline deadline);

  // All of the bytes. kDeadlineExceeded, or kUnavailable if the other end is gone.
  absl::Status Send(absl::string_view bytes, Deadline deadline);
  absl::Status Receive(void* data, size_t size, Deadline deadline);

  // Whether Receive() has something for which poll() would not wake: what has been decrypted.
  bool HasInput() const { return tls_ != nullptr && tls_->HasInput(); }

  // Small messages leave at once.
  void SetNoDelay();
  // The connection breaks within two minutes after the other end's machine is gone.
  void SetKeepAlive();

  // The port that it is bound to.
  absl::StatusOr<uint16_t> LocalPort() const;

  bool valid() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  absl::Status Await(short events, Deadline deadline);

  absl::Status SendRaw(absl::string_view bytes, Deadline deadline);
  // At least one byte; how many.
  absl::StatusOr<size_t> ReceiveRaw(void* data, size_t size, Deadline deadline);
  absl::Status SendTlsOutput(Deadline deadline);
  absl::Status ReceiveTlsInput(Deadline deadline);

  int fd_ = -1;  // does not block
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_SOCKET_H_
