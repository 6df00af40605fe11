// Host names and socket addresses, checked before a transport gets them: a library below may throw
// on threads of its own, where no caller can catch, when it cannot bind or parse one.
#ifndef DISTGRAD_CORE_NET_ADDRESS_H_
#define DISTGRAD_CORE_NET_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

// The numeric address ("127.0.0.1", "[::1]") of `host`, a name, an address or an interface
// ("eth0"), which this machine can bind: others will be told it, so it must be one particular
// address and not a wildcard. Of an interface it is the first, IPv4 before IPv6. May ask a name
// server, and so may block. kInvalidArgument for a host that is empty, a wildcard, unknown or
// not one of this machine's.
absl::StatusOr<std::string> ResolveBindHost(const std::string& host);

// The numeric address ("10.0.0.7", "fd00::7") by which this machine reaches `host`, a name or an
// address: where others on the way there reach it, unless addresses are translated between. Sends
// nothing. May ask a name server, and so may block. kUnavailable where there is no way there.
absl::StatusOr<std::string> AddressToward(const std::string& host);

// Whether what ResolveBindHost returned, with a port or without, can be reached from its own
// machine only.
bool IsLoopback(absl::string_view host);

// Whether a connected socket has reached itself: where nobody listens, TCP connects a socket whose
// own port is the one that it looks for, and the kernel may choose that one. Then it is to be
// closed as one that was refused; this sees to it that it does not keep the port after that.
bool HasReachedItself(int socket);

// OK if `address` is "<IPv4>:<port>" or "[<IPv6>]:<port>", all numeric; else
// kInvalidArgument.
absl::Status CheckSocketAddress(absl::string_view address);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_ADDRESS_H_
