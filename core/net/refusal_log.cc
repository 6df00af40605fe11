// Writes one line for some of the refused connections, lest the log fill.
#include "core/net/refusal_log.h"

#include <netdb.h>
#include <sys/socket.h>

#include "core/base/log.h"

namespace distgrad {
namespace {

// How many addresses and reasons are told apart, and how long one of them is silent at most.
constexpr size_t kMaxKinds = 64;
constexpr absl::Duration kSilence = absl::Minutes(10);

// "10.0.0.7", or "this machine" for a Unix-domain socket.
std::string PeerOf(int fd) {
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

}  // namespace

void RefusalLog::Add(int fd, const Handshake& handshake, const absl::Status& why) {
  const absl::Status hello = handshake.CheckHello();
  const absl::string_view reason = hello.ok() ? why.message() : hello.message();
  if (!handshake.has_hello() || (hello.ok() && !absl::IsUnauthenticated(why))) {
    // Not louder: scanners and health checks are everywhere.
    DG_LOG(INFO) << "refused a connection to " << to_ << ": " << reason;
    return;
  }
  const std::pair<std::string, std::string> key(PeerOf(fd), std::string(reason));
  const auto known = kinds_.find(key);
  Kind& kind = known != kinds_.end()       ? known->second
               : kinds_.size() < kMaxKinds ? kinds_[key]
                                           : others_;
  const absl::Time now = now_();
  if (!IsWorthALine(++kind.count) && now - kind.last_line < kSilence) return;
  kind.last_line = now;
  DG_LOG(WARNING) << "refused a connection to " << to_ << " from " << key.first << ": " << reason
                  << " (" << kind.count
                  << (&kind == &others_ ? " so far, of various clients)" : " so far)");
}

}  // namespace distgrad
