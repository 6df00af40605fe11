// The endpoint at which a listener of ours can be reached, and the sockets at both ends.
#ifndef DISTGRAD_CORE_NET_ENDPOINT_H_
#define DISTGRAD_CORE_NET_ENDPOINT_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/net/handshake.h"

namespace distgrad {

// A listener: a TCP socket, and a Unix-domain one for clients that share its place.
struct Endpoint {
  std::string tcp;    // "127.0.0.1:4711" or "[::1]:4711"
  std::string place;  // ThisPlace() of the listener
  std::string name;   // of the Unix-domain socket in the abstract namespace; hexadecimal
  Token token = {};   // see handshake.h
};

// "<tcp>/<place>/<name>/<token>". All four are needed to connect.
std::string FormatEndpoint(const Endpoint& endpoint);
// kInvalidArgument for anything that FormatEndpoint cannot have made; never repeats the token.
absl::StatusOr<Endpoint> ParseEndpoint(absl::string_view address);

// What two processes have in common that can meet on a Unix-domain socket and are one user: the
// machine's boot, the namespaces of network and users, and the user. "" where that is not to be
// found out; then TCP it is.
const std::string& ThisPlace();

// Whether a process at that place, as ThisPlace() is there, has the same loopback as this one. True
// where it is not to be found out.
bool SharesLoopback(absl::string_view place);
// The same; false where it is not to be found out.
bool IsKnownToShareLoopback(absl::string_view place);

// A file descriptor, closed with this object.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

// All sockets below are non-blocking and closed on exec.

// Listens on a free port of `host`, numeric; `tcp` gets host and port.
absl::StatusOr<Fd> ListenTcp(const std::string& host, std::string* tcp);
// Listens in the abstract namespace: no file, and nothing left behind by a killed process.
absl::StatusOr<Fd> ListenUnix(const std::string& name);

// Both return kUnavailable where nothing can be reached.
absl::StatusOr<Fd> NewSocketFor(const Endpoint& endpoint, bool is_unix);
// 0 when connected, EINPROGRESS, or why it failed; EAGAIN: the listener's queue is full, try later;
// EADDRNOTAVAIL: all ports are in use that a connection there can come from.
int StartConnecting(const Fd& fd, const Endpoint& endpoint, bool is_unix);

// Small messages leave at once.
void SetNoDelay(const Fd& fd);
// The other end has so long to acknowledge what was sent, and to take what waits, or the system
// ends the connection. Of TCP alone; infinite: the system's own time, a quarter of an hour.
void SetAcknowledgeTimeout(const Fd& fd, absl::Duration timeout);
// The process at the other end of a Unix-domain socket, by its number here; 0 for any other socket,
// or where there is no such number.
pid_t PeerProcessOf(const Fd& fd);
// kPermissionDenied unless the other end of a Unix-domain socket is a process of our own user.
absl::Status CheckPeerUser(const Fd& fd);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_ENDPOINT_H_
