// Writes one line for some of the refused connections, lest the log fill.
#include "core/net/refusal_log.h"

#include <netdb.h>
#include <sys/socket.h>

#include "core/base/log.h"

namespace distgrad {
namespace {

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
  if (!IsWorthALine(++count_)) return;
  DG_LOG(WARNING) << "refused a connection to " << to_ << " from " << PeerOf(fd) << ": " << reason
                  << " (" << count_ << " so far)";
}

}  // namespace distgrad
