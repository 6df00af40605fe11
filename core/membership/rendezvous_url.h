// The URL of a job's rendezvous.
//
//   env://                      where the launcher says (core/membership/environment.h)
//   tcp://host:port             a store that worker 0 serves there; [::1] for an IPv6 address
//   file:///path                a store in a file that all workers can open
//
// Each may go on with "?name=value&...":
//   rank, world_size            this worker's place in the job
//   bind                        tcp only: what worker 0 listens on, where that is not `host`:
//                               "0.0.0.0" and "::" are all of its addresses
#ifndef DISTGRAD_CORE_MEMBERSHIP_RENDEZVOUS_URL_H_
#define DISTGRAD_CORE_MEMBERSHIP_RENDEZVOUS_URL_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace distgrad {

inline constexpr int kMaxWorldSize = 1 << 16;  // ranks have 16 bits

struct RendezvousUrl {
  enum class Kind { kEnvironment, kTcp, kFile };

  Kind kind = Kind::kEnvironment;
  std::string host = {};  // of kTcp, without brackets
  uint16_t port = 0;
  std::string bind = {};  // "": the host
  std::string path = {};  // of kFile
  int rank = -1;          // -1: not said
  int world_size = -1;
};

// Reads a URL. kInvalidArgument with the URL and what is wrong with it: another scheme, no host, no
// port from 1 to 65535, a path that is not absolute, a number out of its range, a parameter that is
// unknown or comes twice.
absl::StatusOr<RendezvousUrl> ParseRendezvousUrl(absl::string_view text);

// Reads a decimal number from `low` to `high`, and nothing else; false otherwise.
bool ParseNumber(absl::string_view text, int low, int high, int* number);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_MEMBERSHIP_RENDEZVOUS_URL_H_
