// Asks the machine's resolver and interfaces, and checks numeric addresses.
#include "core/net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace distgrad {
namespace {

bool IsWildcard(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

bool IsLinkLocal(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// 0, or the errno that says why a listener could not be put there.
int TryBind(const addrinfo& info) {
  const int fd = socket(info.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int error = bind(fd, info.ai_addr, info.ai_addrlen) == 0 ? 0 : errno;
  close(fd);
  return error;
}

// "127.0.0.1" or "[::1]".
std::string Numeric(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
    return text;
  }
  inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
            sizeof(text));
  return absl::StrCat("[", text, "]");
}

// The address of an interface: IPv4 before IPv6, and none that is good on its own link only.
// kNotFound, with the names that there are, if there is no such interface.
absl::StatusOr<std::string> AddressOfInterface(const std::string& name) {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) return absl::ErrnoToStatus(errno, "this machine's interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(found, &freeifaddrs);
  std::set<absl::string_view> names;
  std::string ipv4, ipv6;
  for (const ifaddrs* entry = found; entry != nullptr; entry = entry->ifa_next) {
    names.insert(entry->ifa_name);
    if (name != entry->ifa_name || entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET && ipv4.empty()) ipv4 = Numeric(entry->ifa_addr);
    if (family == AF_INET6 && ipv6.empty() && !IsLinkLocal(entry->ifa_addr)) {
      ipv6 = Numeric(entry->ifa_addr);
    }
  }
  if (names.count(name) == 0) {
    return absl::NotFoundError(absl::StrCat("interfaces are ", absl::StrJoin(names, ", ")));
  }
  if (!ipv4.empty() || !ipv6.empty()) return ipv4.empty() ? ipv6 : ipv4;
  return absl::InvalidArgumentError(
      absl::StrCat("cannot listen on interface \"", name, "\": it has no address"));
}

}  // namespace

absl::StatusOr<std::string> ResolveBindHost(const std::string& host) {
  if (host.empty()) return absl::InvalidArgumentError("the host to listen on is empty");
  absl::StatusOr<std::string> interface = AddressOfInterface(host);
  if (!absl::IsNotFound(interface.status())) return interface;
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot listen on host \"", host,
                                                   "\": ", gai_strerror(error), "; the ",
                                                   interface.status().message()));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  int bind_error = EADDRNOTAVAIL;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    if (IsWildcard(info->ai_addr)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cannot listen on \"", host,
          "\": other workers need one particular address of this machine to connect to"));
    }
    if ((bind_error = TryBind(*info)) != 0) continue;
    return Numeric(info->ai_addr);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cannot listen on host \"", host, "\": ", std::strerror(bind_error)));
}

absl::StatusOr<std::string> AddressToward(const std::string& host) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  // Any port: to connect a socket of datagrams only has the kernel look for the way.
  const int error = getaddrinfo(host.c_str(), "9", &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("host \"", host, "\": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  int last = EADDRNOTAVAIL;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
    const int fd = socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own = {};
    socklen_t size = sizeof(own);
    const bool known = fd >= 0 && connect(fd, info->ai_addr, info->ai_addrlen) == 0 &&
                       getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0;
    if (!known) last = errno;
    if (fd >= 0) close(fd);
    const auto* address = reinterpret_cast<const sockaddr*>(&own);
    // One that is good on its own link only would have to be told with its link's name there.
    if (!known || IsLinkLocal(address)) continue;
    std::string text = Numeric(address);
    if (text.front() == '[') text = text.substr(1, text.size() - 2);
    return text;
  }
  return absl::UnavailableError(absl::StrCat("host \"", host, "\": ", std::strerror(last)));
}

bool IsLoopback(absl::string_view host) {
  return absl::StartsWith(host, "[::1]") || absl::StartsWith(host, "127.");
}

bool HasReachedItself(int socket) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      own_size != peer_size || std::memcmp(&own, &peer, own_size) != 0) {
    return false;
  }
  const linger at_once = {1, 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  return true;
}

absl::Status CheckSocketAddress(absl::string_view address) {
  const auto bad = [address](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" ", what));
  };
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return bad("has no port");
  const absl::string_view port = address.substr(colon + 1);
  uint32_t number = 0;
  // SimpleAtoi would take blanks and a sign.
  if (port.empty() || port.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(port, &number) || number == 0 || number > 65535) {
    return bad("has no port between 1 and 65535");
  }
  absl::string_view host = address.substr(0, colon);
  in6_addr parsed;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    if (inet_pton(AF_INET6, std::string(host).c_str(), &parsed) == 1) return absl::OkStatus();
  } else if (inet_pton(AF_INET, std::string(host).c_str(), &parsed) == 1) {
    return absl::OkStatus();
  }
  return bad("is not a numeric IPv4 or [IPv6] address and a port");
}

}  // namespace distgrad
