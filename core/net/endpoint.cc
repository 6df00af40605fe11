// Formats and parses endpoints, opens their sockets, and finds what two processes share.
#include "core/net/endpoint.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/base/descriptors.h"
#include "core/base/status.h"
#include "core/net/address.h"

namespace distgrad {
namespace {

constexpr int kBacklog = 1024;
constexpr size_t kMaxPlace = 128;
constexpr absl::string_view kUnixPrefix = "distgrad/";
constexpr size_t kUnixNameDigits = 32;
constexpr size_t kBootIdSize = 36;

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isxdigit(c); });
}

// A socket address of either family.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// `tcp` has passed CheckSocketAddress, but for a port of 0.
SocketAddress TcpAddress(absl::string_view tcp) {
  SocketAddress address;
  const size_t colon = tcp.rfind(':');
  uint32_t port = 0;
  if (!absl::SimpleAtoi(tcp.substr(colon + 1), &port)) return address;
  absl::string_view host = tcp.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    absl::ConsumeSuffix(&host, "]");
    auto* in6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET6, std::string(host).c_str(), &in6->sin6_addr);
    address.size = sizeof(sockaddr_in6);
  } else {
    auto* in = reinterpret_cast<sockaddr_in*>(&address.storage);
    in->sin_family = AF_INET;
    in->sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, std::string(host).c_str(), &in->sin_addr);
    address.size = sizeof(sockaddr_in);
  }
  return address;
}

SocketAddress UnixAddress(absl::string_view name) {
  SocketAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  un->sun_family = AF_UNIX;
  // The zero at the front makes it abstract.
  const std::string path = absl::StrCat(absl::string_view("\0", 1), kUnixPrefix, name);
  std::memcpy(un->sun_path, path.data(), path.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  return address;
}

absl::StatusOr<Fd> Listen(const SocketAddress& address) {
  Fd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "no socket to listen on");
  if (bind(fd.get(), address.get(), address.size) != 0) {
    return absl::ErrnoToStatus(errno, "bind");
  }
  if (listen(fd.get(), kBacklog) != 0) return absl::ErrnoToStatus(errno, "listen");
  return fd;
}

// The number in "net:[4026531840]", or "".
std::string Namespace(const char* kind) {
  char text[64];
  const ssize_t n = readlink(absl::StrCat("/proc/self/ns/", kind).c_str(), text, sizeof(text));
  std::string number;
  for (ssize_t i = 0; i < n; ++i) {
    if (absl::ascii_isdigit(text[i])) number += text[i];
  }
  return number;
}

std::string FindPlace() {
  const Fd fd(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char boot[kBootIdSize];
  if (!fd.valid() || read(fd.get(), boot, sizeof(boot)) != sizeof(boot)) return "";
  const std::string net = Namespace("net"), user = Namespace("user");
  if (net.empty() || user.empty()) return "";
  return absl::StrCat(absl::string_view(boot, sizeof(boot)), "-", net, "-", user, "-", geteuid());
}

// Whether this machine has an address from which a packet could go there: a socket for datagrams
// sends nothing when it is connected, and its ports are others.
bool HasAddressFor(const SocketAddress& there) {
  const Fd fd(socket(there.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return !fd.valid() || connect(fd.get(), there.get(), there.size) == 0 || errno != EADDRNOTAVAIL;
}

}  // namespace

std::string FormatEndpoint(const Endpoint& endpoint) {
  const std::string token(endpoint.token.begin(), endpoint.token.end());
  return absl::StrCat(endpoint.tcp, "/", endpoint.place, "/", endpoint.name, "/",
                      absl::BytesToHexString(token));
}

absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view address) {
  const std::vector<absl::string_view> parts = absl::StrSplit(address, '/');
  DG_RETURN_IF_ERROR(CheckSocketAddress(parts[0]));
  const auto bad = [&parts](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("the address that begins with \"", parts[0], "\" has ", what));
  };
  if (parts.size() != 4) return bad("not four parts");
  const absl::string_view place = parts[1], name = parts[2], token = parts[3];
  if (place.size() > kMaxPlace || !std::all_of(place.begin(), place.end(), [](char c) {
        return absl::ascii_isxdigit(c) || c == '-';
      })) {
    return bad("a malformed place");
  }
  if (name.size() != kUnixNameDigits || !IsHex(name)) return bad("a malformed socket name");
  if (token.size() != 2 * kTokenBytes || !IsHex(token)) return bad("a malformed token");
  Endpoint endpoint{std::string(parts[0]), std::string(place), std::string(name), {}};
  const std::string bytes = absl::HexStringToBytes(token);
  std::copy(bytes.begin(), bytes.end(), endpoint.token.begin());
  return endpoint;
}

const std::string& ThisPlace() {
  static const std::string* const place = new std::string(FindPlace());
  return *place;
}

bool SharesLoopback(absl::string_view place) {
  return ThisPlace().empty() || place.size() <= kBootIdSize || IsKnownToShareLoopback(place);
}

bool IsKnownToShareLoopback(absl::string_view place) {
  const std::string& here = ThisPlace();
  if (here.empty() || place.size() <= kBootIdSize) return false;
  // The machine's boot, and the namespace of the network; the boot's own id has dashes, too.
  const auto network = [](absl::string_view place) {
    return place.substr(0, place.find('-', kBootIdSize + 1));
  };
  return network(place) == network(here);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

int Fd::Release() { return std::exchange(fd_, -1); }

absl::StatusOr<Fd> ListenTcp(const std::string& host, std::string* tcp) {
  absl::StatusOr<Fd> fd = Listen(TcpAddress(absl::StrCat(host, ":0")));
  DG_RETURN_IF_ERROR(Annotate(fd.status(), absl::StrCat("listening on ", host)));
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  if (getsockname(fd->get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return absl::ErrnoToStatus(errno, "getsockname");
  }
  // Both families have the port at the same place.
  *tcp = absl::StrCat(host, ":", ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port));
  return fd;
}

absl::StatusOr<Fd> ListenUnix(const std::string& name) { return Listen(UnixAddress(name)); }

absl::StatusOr<Fd> NewSocketFor(const Endpoint& endpoint, bool is_unix) {
  const int family = is_unix ? AF_UNIX : TcpAddress(endpoint.tcp).storage.ss_family;
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "no socket to connect with");
  if (!is_unix) SetNoDelay(fd);
  return fd;
}

int StartConnecting(const Fd& fd, const Endpoint& endpoint, bool is_unix) {
  const SocketAddress address = is_unix ? UnixAddress(endpoint.name) : TcpAddress(endpoint.tcp);
  if (connect(fd.get(), address.get(), address.size) == 0) return 0;
  const int error = errno;
  return error == EADDRNOTAVAIL && !HasAddressFor(address) ? ENETUNREACH : error;
}

void SetNoDelay(const Fd& fd) {
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void SetAcknowledgeTimeout(const Fd& fd, absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return;
  const auto ms = static_cast<unsigned>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 1, std::numeric_limits<int>::max()));
  setsockopt(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
}

pid_t PeerProcessOf(const Fd& fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX) {
    return 0;
  }
  ucred peer = {};
  size = sizeof(peer);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return 0;
  return peer.pid;
}

absl::Status CheckPeerUser(const Fd& fd) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::ErrnoToStatus(errno, "who is at the other end of a socket");
  }
  if (peer.uid == geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("the other end runs as user ", peer.uid, ", we as ", geteuid()));
}

}  // namespace distgrad
