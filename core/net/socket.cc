// Connects, listens, sends and receives with poll(), each until a deadline.
#include "core/net/socket.h"

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
#include "core/base/descriptors.h"
#include "core/base/status.h"
#include "core/net/address.h"

namespace distgrad {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::Status ErrnoStatus(absl::StatusCode code, absl::string_view what, int error) {
  return absl::Status(code, absl::StrCat(what, ": ", ErrnoText(error)));
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

Socket NewSocket(int family) {
  return Socket(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

int PollMilliseconds(Deadline deadline) {
  return static_cast<int>(absl::ToInt64Milliseconds(std::min(deadline.Left(), absl::Minutes(1)) +
                                                    absl::Microseconds(999)));
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<Socket> Socket::Connect(const std::string& host, uint16_t port, Deadline deadline) {
  std::string why;
  const AddressList found = Resolve(host, port, &why);
  if (found == nullptr) return absl::UnavailableError(why);
  std::vector<Address> addresses;
  for (const addrinfo* address = found.get(); address != nullptr; address = address->ai_next) {
    addresses.push_back({{}, address->ai_addrlen});
    std::memcpy(&addresses.back().storage, address->ai_addr, address->ai_addrlen);
  }
  return ConnectToAny(addresses, deadline);
}

absl::StatusOr<Socket> Socket::ConnectToAny(const std::vector<Address>& addresses,
                                            Deadline deadline) {
  constexpr absl::Duration kHeadStart = absl::Milliseconds(250);
  absl::Status status;
  const auto fail = [&status](absl::string_view what, int error) {
    const bool refused = error == ECONNREFUSED;
    // That nobody listens there is the word of all addresses, or of none.
    if (refused && absl::IsUnavailable(status)) return;
    status = ErrnoStatus(
        refused ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kUnavailable, what,
        error);
  };
  std::vector<Socket> in_flight;
  std::vector<pollfd> entries;
  size_t begun = 0;
  Deadline next = absl::InfinitePast();  // when the next one begins, unless all others failed
  for (;;) {
    while (begun < addresses.size() && (in_flight.empty() || next.Passed())) {
      const Address& address = addresses[begun++];
      Socket socket = NewSocket(address.storage.ss_family);
      if (!socket.valid()) {
        fail("socket", errno);
        continue;
      }
      const auto* to = reinterpret_cast<const sockaddr*>(&address.storage);
      int error = connect(socket.fd_, to, address.size) == 0 ? 0 : errno;
      if (error == 0 && HasReachedItself(socket.fd_)) error = ECONNREFUSED;
      if (error == 0) {
        socket.SetNoDelay();
        return socket;
      }
      if (error == EINPROGRESS) {
        in_flight.push_back(std::move(socket));
        next = Deadline::After(kHeadStart);
      } else {
        fail("connect", error);
      }
    }
    if (in_flight.empty()) {
      return status.ok() ? absl::UnavailableError("no address to connect to") : status;
    }
    entries.clear();
    for (const Socket& socket : in_flight) entries.push_back({socket.fd_, POLLOUT, 0});
    const Deadline until = begun < addresses.size() ? std::min(next, deadline) : deadline;
    const int ready = poll(entries.data(), entries.size(), PollMilliseconds(until));
    if (ready < 0 && errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "poll", errno);
    }
    for (size_t i = ready > 0 ? entries.size() : 0; i-- > 0;) {
      if (entries[i].revents == 0) continue;
      int error = 0;
      socklen_t size = sizeof(error);
      getsockopt(in_flight[i].fd_, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error == 0 && HasReachedItself(in_flight[i].fd_)) error = ECONNREFUSED;
      if (error == 0) {
        in_flight[i].SetNoDelay();
        return std::move(in_flight[i]);
      }
      fail("connect", error);
      in_flight.erase(in_flight.begin() + static_cast<ptrdiff_t>(i));
      next = absl::InfinitePast();
    }
    if (ready == 0 && deadline.Passed()) return absl::DeadlineExceededError("no answer");
  }
}

absl::StatusOr<Socket> Socket::Listen(const std::string& host, uint16_t port) {
  std::string why;
  const AddressList addresses = Resolve(host, port, &why);
  absl::Status status =
      absl::UnavailableError(absl::StrCat("cannot listen on host \"", host, "\": ", why));
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = NewSocket(address->ai_family);
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

absl::Status Socket::Await(short events, Deadline deadline) {
  for (;;) {
    pollfd entry = {fd_, events, 0};
    const int ready = poll(&entry, 1, PollMilliseconds(deadline));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "poll", errno);
    }
    if (ready == 0 && deadline.Passed()) return absl::DeadlineExceededError("no answer");
  }
}

absl::Status Socket::StartTls(const Handshake& handshake,
                              const std::shared_ptr<Certificates>& certificates,
                              Deadline deadline) {
  DG_ASSIGN_OR_RETURN(tls_, TlsSession::Create(handshake, certificates));
  for (;;) {
    const absl::Status established = tls_->Establish();
    // The other end is told why.
    const absl::Status sent = SendTlsOutput(deadline);
    if (absl::IsUnavailable(established) && certificates != nullptr) {
      return absl::PermissionDeniedError(established.message());
    }
    DG_RETURN_IF_ERROR(established);
    DG_RETURN_IF_ERROR(sent);
    if (tls_->established()) return absl::OkStatus();
    DG_RETURN_IF_ERROR(ReceiveTlsInput(deadline));
  }
}

absl::Status Socket::Send(absl::string_view bytes, Deadline deadline) {
  if (tls_ == nullptr) return SendRaw(bytes, deadline);
  DG_RETURN_IF_ERROR(tls_->Write(bytes));
  return SendTlsOutput(deadline);
}

absl::Status Socket::Receive(void* data, size_t size, Deadline deadline) {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    size_t received = 0;
    if (tls_ == nullptr) {
      DG_ASSIGN_OR_RETURN(received, ReceiveRaw(to, size, deadline));
    } else {
      DG_ASSIGN_OR_RETURN(received, tls_->Read(to, size));
      if (received == 0) DG_RETURN_IF_ERROR(ReceiveTlsInput(deadline));
    }
    to += received;
    size -= received;
  }
  return absl::OkStatus();
}

absl::Status Socket::SendTlsOutput(Deadline deadline) {
  const absl::string_view output = tls_->output();
  DG_RETURN_IF_ERROR(SendRaw(output, deadline));
  tls_->DropOutput(output.size());
  return absl::OkStatus();
}

absl::Status Socket::ReceiveTlsInput(Deadline deadline) {
  const absl::Span<char> space = tls_->InputSpace();
  DG_ASSIGN_OR_RETURN(const size_t received, ReceiveRaw(space.data(), space.size(), deadline));
  tls_->AddInput(received);
  return absl::OkStatus();
}

absl::Status Socket::SendRaw(absl::string_view bytes, Deadline deadline) {
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

absl::StatusOr<size_t> Socket::ReceiveRaw(void* data, size_t size, Deadline deadline) {
  for (;;) {
    const ssize_t received = recv(fd_, data, size, 0);
    if (received > 0) return static_cast<size_t>(received);
    if (received == 0) return absl::UnavailableError("the other end closed the connection");
    if (errno == EAGAIN) {
      DG_RETURN_IF_ERROR(Await(POLLIN, deadline));
    } else if (errno != EINTR) {
      return ErrnoStatus(absl::StatusCode::kUnavailable, "receive", errno);
    }
  }
}

void Socket::SetNoDelay() {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void Socket::SetKeepAlive() {
  const int on = 1, idle = 60, interval = 10, probes = 6;  // seconds
  setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd_, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(fd_, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(fd_, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
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
