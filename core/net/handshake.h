// Lets the two ends of a new connection prove to each other that they belong together, before
// anything else is read from it.
//
//   client -> server   hello: magic, version, whether it has a cluster key and certificates, 32
//                      random bytes
//   server -> client   hello: the same of its own
//   client -> server   proof: HMAC-SHA256 over "client", both hellos and the listener's token
//   server -> client   proof: the same with "server"; or that it has no place for the client
//
// With a cluster key or certificates, TLS follows (tls.h) on every connection that leaves the
// machine or could. With certificates alone it is TLS that proves who the ends are; with both it
// is both, and each end proves within TLS, too, that this handshake was its own.
//
// The HMAC's key is the cluster key; without one it is the token, 16 random bytes that stand in the
// listener's address. So where there is a cluster key no client without it gets past here, and
// where there is none no client that does not know the address. The token binds the proof to this
// one listener: it cannot be passed on to another worker, nor does an address outlive its listener.
#ifndef DISTGRAD_CORE_NET_HANDSHAKE_H_
#define DISTGRAD_CORE_NET_HANDSHAKE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/net/cluster_key.h"

namespace distgrad {

inline constexpr size_t kHelloBytes = 48;
inline constexpr size_t kProofBytes = 32;
inline constexpr size_t kTokenBytes = 16;

using Token = std::array<uint8_t, kTokenBytes>;

// One end of one handshake: bytes in, bytes out; no I/O. For one thread.
class Handshake {
 public:
  enum class Role { kClient, kServer };

  // `key` is the cluster key, or empty. Of two a client proves itself by the first, and a server
  // takes either, and answers with the client's. kInternal without random numbers.
  // `certificates`: whether this end wants certificates in TLS. `encrypts_unix`: whether it wants
  // TLS on Unix-domain sockets, too.
  static absl::StatusOr<Handshake> Create(Role role, const ClusterKey& key, const Token& token,
                                          bool certificates = false, bool encrypts_unix = false);

  // Returns what to send now; empty if nothing. Each byte is given out once.
  std::string TakeOutput();

  // Returns OK while nothing that the other end has said so far shows that it has another version
  // or, where this end has a cluster key, none, or the other way round; likewise of certificates.
  // Meant for the log of a
  // server, which lets the client find that out first.
  absl::Status CheckHello() const;
  Role role() const { return role_; }
  // Returns, once done, whether one of the ends wants TLS on Unix-domain sockets.
  bool encrypts_unix() const;
  // Returns whether the other end speaks this protocol at all.
  bool has_hello() const { return !other_hello_.empty(); }

  // Returns how many more bytes it can take now, 0 once done: whatever comes after them is not its
  // own.
  size_t wanted() const { return wanted_ - received_.size(); }
  bool done() const { return step_ == Step::kDone; }

  // Returns, once done, a secret of the two ends and of this connection alone; for ends with a
  // cluster key. kInternal if the crypto library fails.
  absl::StatusOr<Digest> Secret() const;

  // Returns what a server says to a client that it closes for want of a place, between its hello
  // and its proof, lest the client take that for a refusal of its key; "" at any other time.
  absl::string_view NoPlace() const;

  // Takes at most wanted() bytes from the other end. kUnauthenticated, naming the likely reason,
  // if they show that it does not belong here, kUnavailable if it has no place for this client;
  // then the connection is to be closed.
  absl::Status Receive(absl::string_view bytes);

 private:
  enum class Step { kHello, kProof, kDone };

  Handshake(Role role, const ClusterKey& key, const Token& token)
      : role_(role), other_key_(key.accepted()), token_(token), key_(key.used()) {}

  uint16_t FlagsOf(absl::string_view hello) const;
  absl::Status CheckMagic() const;
  absl::Status TakeHello();
  absl::Status TakeProof();
  absl::Status SendProof();
  absl::StatusOr<Digest> Proof(Role role) const;
  // HMAC over a purpose, which no other text begins with, both hellos and the token.
  absl::StatusOr<Digest> Derive(absl::string_view purpose) const;

  // Constant after Create().
  Role role_;
  SecretText other_key_;  // a server's second one; "": none
  Token token_;
  std::string own_hello_;

  SecretText key_;  // "": none. A server's is the client's, once that has proved itself
  Step step_ = Step::kHello;
  size_t wanted_ = kHelloBytes;  // of the message that is being received
  std::string received_;         // of it
  std::string other_hello_;
  std::string output_;
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_HANDSHAKE_H_
