// Writes one line for some of the refused connections, lest the log fill.
#include "core/net/refusal_log.h"

#include <netdb.h>
#include <sys/socket.h>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "core/base/log.h"

namespace distgrad {
namespace {

// How many addresses are told apart, and how many kinds of reasons of each.
constexpr size_t kMaxClients = 64, kMaxKinds = 16;
// How long nothing is said of a kind at most; and how long an address is remembered.
constexpr absl::Duration kSilence = absl::Minutes(10);

// "10.0.0.7", or "this machine" for a Unix-domain socket.
std::string AddressOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  char host[NI_MAXHOST] = {};
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "somewhere";
  if (address.ss_family == AF_UNIX) return "this machine";
  if (getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof(host), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "somewhere";
  }
  return host;
}

// A reason without what its client may have written: a number, the names of its certificate behind
// "DNS:" and the like, and what stands in parentheses.
absl::string_view KindOf(absl::string_view reason) {
  size_t end = reason.find_first_of("0123456789(");
  for (size_t colon = reason.find(':'); colon < end; colon = reason.find(':', colon + 1)) {
    if (!absl::StartsWith(reason.substr(colon), ": ")) end = colon;
  }
  return reason.substr(0, end);
}

}  // namespace

RefusalLog::Client& RefusalLog::Find(absl::string_view address, absl::Time now) {
  const auto known = clients_.find(address);
  if (known != clients_.end()) return known->second;
  if (clients_.size() == kMaxClients) {
    const auto silent = absl::c_min_element(clients_, [](const auto& one, const auto& other) {
      return one.second.last < other.second.last;
    });
    if (now - silent->second.last < kSilence) return others_;
    clients_.erase(silent);
  }
  return clients_[std::string(address)];
}

void RefusalLog::Add(int fd, const Handshake& handshake, const absl::Status& why) {
  Add(AddressOf(fd), handshake, why);
}

void RefusalLog::Add(absl::string_view address, const Handshake& handshake,
                     const absl::Status& why) {
  const absl::Status hello = handshake.CheckHello();
  const absl::string_view reason = hello.ok() ? why.message() : hello.message();
  if (!handshake.has_hello() || (hello.ok() && !absl::IsUnauthenticated(why))) {
    // Not louder: scanners and health checks are everywhere.
    DG_LOG(INFO) << "refused a connection to " << to_ << ": " << reason;
    return;
  }
  const absl::Time now = now_();
  Client& client = Find(address, now);
  client.last = now;
  absl::string_view name = KindOf(reason);
  // The TLS of a stranger may go wrong in many ways.
  if (client.kinds.size() >= kMaxKinds && client.kinds.count(name) == 0) name = "";
  Kind& kind = client.kinds[std::string(name)];
  if (!IsWorthALine(++kind.count) && now - kind.last_line < kSilence) return;
  kind.last_line = now;
  DG_LOG(WARNING) << "refused a connection to " << to_ << " from " << address << ": " << reason
                  << " (" << kind.count
                  << (&client == &others_ ? " so far, of various clients)" : " so far)");
}

}  // namespace distgrad
