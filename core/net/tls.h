// Encrypts and authenticates what goes over one connection, with TLS 1.3 (RFC 8446).
//
// The handshake (handshake.h) comes first, in the clear: so a client without the cluster key costs
// no more than that. What both ends have in common afterwards, Handshake::Secret(), is the
// pre-shared key of TLS. Where the ends have certificates (certificates.h) both show theirs
// instead, and each checks the other's; and both then prove inside of TLS that the handshake was
// theirs, by a MAC with its secret over what this session of TLS alone exports (RFC 9266): for a
// certificate neither tells one worker of a job from another nor says that its owner has the
// cluster key, and who is on the way could pass on a handshake that is not its own. An ephemeral
// Diffie-Hellman exchange goes into the keys too, so an attacker who learns the cluster key or a
// private key later cannot read what was recorded before.
//
// What is changed, left out, repeated or moved on its way is an error of Read(), and nothing of it
// is given out; nor is what comes behind it. That the stream ends is for the caller to notice: it
// is not the end of a message.
#ifndef DISTGRAD_CORE_NET_TLS_H_
#define DISTGRAD_CORE_NET_TLS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/net/certificates.h"
#include "core/net/cluster_key.h"
#include "core/net/handshake.h"

using SSL_CTX = struct ssl_ctx_st;  // OpenSSL's

namespace distgrad {

// One end of one connection: bytes in, bytes out; no I/O. For one thread at a time.
class TlsSession {
 public:
  // TLS changes its keys after so many bytes: AES-GCM is good for a little more than 2^24 records
  // of 16 KiB under one key (RFC 8446, section 5.5).
  static constexpr uint64_t kKeyBytes = uint64_t{1} << 37;

  // `secret`: Handshake::Secret(). kInternal if the crypto library fails.
  static absl::StatusOr<std::unique_ptr<TlsSession>> Create(Handshake::Role role,
                                                            const Digest& secret,
                                                            uint64_t key_bytes = kKeyBytes);
  // By certificates. The other end's is one of an authority that is accepted here, is valid now,
  // and has the name that it has to have; or else Establish() fails at both ends, and says why.
  static absl::StatusOr<std::unique_ptr<TlsSession>> Create(Handshake::Role role,
                                                            Certificates& certificates);
  // By certificates where there are some, and else by the secret of the handshake, which is done.
  static absl::StatusOr<std::unique_ptr<TlsSession>> Create(
      const Handshake& handshake, const std::shared_ptr<Certificates>& certificates);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Goes on with TLS's own handshake: with what has been received, and what is to be sent. By
  // certificates a client is done when the server has said that it takes the client's, for a client
  // of TLS 1.3 has finished its part before the server has looked; and each end when the other has
  // proved that it is the one that has shaken hands. Errors are final: the connection is to be
  // closed. kUnauthenticated if a server that has shown who it is refuses this client's
  // certificate, kPermissionDenied if this end refuses the other one's; else kUnavailable.
  absl::Status Establish();
  bool established() const { return established_; }

  // InputSpace() is where the next bytes from the socket go; AddInput() says how many have come.
  // There is space whenever Read() or Establish() want more. It becomes larger where it was full: a
  // connection that carries little takes little.
  absl::Span<char> InputSpace();
  void AddInput(size_t size);
  // Returns whether Read() may find something without more bytes from the socket.
  bool HasInput() const;

  // Decrypts up to `size` bytes of one record, once established. Returns how many, 0 if it takes
  // more input first. An error (kUnavailable) is final; many records without any byte are one.
  absl::StatusOr<size_t> Read(void* data, size_t size);
  // Encrypts all of the bytes, once established, in records of up to 16 KiB.
  absl::Status Write(absl::string_view bytes);

  // output() is what is to be sent, in this order; DropOutput() says that the first `size` bytes of
  // it are.
  absl::string_view output() const { return absl::string_view(output_).substr(output_begin_); }
  void DropOutput(size_t size);

 private:
  struct Library;  // what is OpenSSL's
  class Settings;  // and of all sessions

  TlsSession();

  absl::Status Init(Handshake::Role role, SSL_CTX* context);
  absl::Status Error(int result);
  // The part of Establish() behind TLS's own handshake: each end proves that it has shaken hands.
  absl::Status ProveHandshake();
  bool HasTooManyEmpty() const;
  void CountBytes(size_t size);
  // What a server, or a client, proves that with in this session alone.
  absl::StatusOr<Digest> ProofOf(bool server) const;

  // Constant after Create().
  Digest secret_ = {};  // of the handshake; zeros: by certificates without one
  std::shared_ptr<const CertificateVersion> certificates_;  // null: by the secret
  uint64_t key_bytes_ = kKeyBytes;

  absl::Status refused_;     // why the other end's certificate is
  bool has_proved_ = false;  // this end has
  Digest other_proof_ = {};  // of which `other_proof_size_` bytes have been received
  size_t other_proof_size_ = 0;
  bool awaits_welcome_ = false;  // a client's; the other end has shown who it is
  bool established_ = false;
  bool past_handshake_ = false;  // TLS's own
  // Records without a byte, and messages of TLS's own, that have been received behind it; less as
  // bytes come. With `in_record_` one of them is a record of which more is to come.
  int empty_ = 0;
  bool in_record_ = false;
  uint64_t bytes_ = 0;    // received since `empty_` became less
  uint64_t written_ = 0;  // bytes, under this key
  std::unique_ptr<char[]> input_;
  size_t input_size_ = 0, input_begin_ = 0, input_end_ = 0;
  bool input_was_full_ = false;
  std::string output_;
  size_t output_begin_ = 0;

  std::unique_ptr<Library> library_;  // constant after Create(); uses all of the above
};

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_TLS_H_
