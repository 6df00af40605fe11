#include "core/rpc/store/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/status.h"

namespace distgrad {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::Status ErrnoStatus(absl::StatusCode code, absl::string_view what, int error) {
  return absl::Status(code, absl::StrCat(what, ": ", std::strerror(error)));
}

// The reason goes to *error if there is no address.
AddressList Resolve(const std::string& host, uint16_t port, std::string* error) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int result = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (result != 0) *error = gai_strerror(result);
  return AddressList(result == 0 ? found : nullptr, &freeaddrinfo);
}

Socket NewSocket(const addrinfo& address) {
  return Socket(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<Socket> Socket::Connect(const std::string& host, uint16_t port,
                                       absl::Time deadline) {
  std::string why;
  const AddressList addresses = Resolve(host, port, &why);
  absl::Status status = absl::UnavailableError(why);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = NewSocket(*address);
    if (!socket.valid()) {
      status = ErrnoStatus(absl::StatusCode::kUnavailable, "socket", errno);
      continue;
    }
    int error = connect(socket.fd_, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      if (status = socket.Await(POLLOUT, deadline); !status.ok()) continue;
      socklen_t size = sizeof(error);
      getsockopt(socket.fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      socket.SetNoDelay();
      return socket;
    }
    status = ErrnoStatus(error == ECONNREFUSED ? absl::StatusCode::kFailedPrecondition
                                               : absl::StatusCode::kUnavailable,
                         "connect", error);
  }
  return status;
}

absl::StatusOr<Socket> Socket::Listen(const std::string& host, uint16_t port) {
  std::string why;
  const AddressList addresses = Resolve(host, port, &why);
  absl::Status status =
      absl::UnavailableError(absl::StrCat("cannot listen on host \"", host, "\": ", why));
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = NewSocket(*address);
    const int on = 1;
    int error = errno;
    if (socket.valid()) {
      // A port whose former owner's connections still fade away is free.
      setsockopt(socket.fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
      if (bind(socket.fd_, address->ai_addr, address->ai_addrlen) == 0 &&
          listen(socket.fd_, SOMAXCONN) == 0) {
        return socket;
      }
      error = errno;
    }
    if (error == EADDRINUSE) {
      return absl::AlreadyExistsError(
          absl::StrCat("cannot listen on port ", port, ": already in use"));
    }
    status =
        ErrnoStatus(absl::StatusCode::kInvalidArgument,
                    absl::StrCat("cannot listen on port ", port, " of host \"", host, "\""), error);
  }
  return status;
}

absl::Status Socket::Await(short events, absl::Time deadline) {
  for (;;) {
    const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
    // Rounded up, so that it does not spin at the end; at most a minute, which fits.
    const int millis = static_cast<int>(
        absl::ToInt64Milliseconds(std::min(left, absl::Minutes(1)) + absl::Microseconds(999)));
    pollfd entry = {fd_, events, 0};
    const int ready = poll(&entry, 1, millis);
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "poll", errno);
    }
    if (ready == 0 && absl::Now() >= deadline) return absl::DeadlineExceededError("no answer");
  }
}

absl::Status Socket::Send(absl::string_view bytes, absl::Time deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      DG_RETURN_IF_ERROR(Await(POLLOUT, deadline));
    } else if (errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "send", errno);
    }
  }
  return absl::OkStatus();
}

absl::Status Socket::Receive(void* data, size_t size, absl::Time deadline) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t received = recv(fd_, to, size, 0);
    if (received > 0) {
      to += received;
      size -= static_cast<size_t>(received);
    } else if (received == 0) {
      return absl::UnavailableError("the other end closed the connection");
    } else if (errno == EAGAIN) {
      DG_RETURN_IF_ERROR(Await(POLLIN, deadline));
    } else if (errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "receive", errno);
    }
  }
  return absl::OkStatus();
}

void Socket::SetNoDelay() {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<uint16_t> Socket::LocalPort() const {
  sockaddr_storage address;
  socklen_t size = sizeof(address);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return ErrnoStatus(absl::StatusCode::kInternal, "getsockname", errno);
  }
  return ntohs(address.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in*>(&address)->sin_port
                   : reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
}

}  // namespace distgrad
