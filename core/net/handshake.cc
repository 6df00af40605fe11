// Runs the steps of a handshake over bytes, without I/O.
#include "core/net/handshake.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "core/base/wire.h"
#include "core/net/certificate_files.h"
#include "core/net/cluster_key.h"

namespace distgrad {
namespace {

constexpr absl::string_view kMagic = "distgrad";
constexpr uint16_t kVersion = 4;
constexpr uint16_t kHasKey = 1, kHasCertificates = 2, kEncryptsUnix = 4;  // flags
constexpr size_t kNonceBytes = 32;
// In the place of a proof, which begins with it once in 2^256 times.
constexpr absl::string_view kNoPlace = "distgrad has no place, try again";
static_assert(kNoPlace.size() == kProofBytes);

absl::Status NotOurs(absl::string_view key) {
  return absl::UnauthenticatedError(
      key.empty() ? "the other end is no worker of this job"
                  : absl::StrCat("the other end is no worker of this job, or has another cluster "
                                 "key (",
                                 kClusterKeySetting, ")"));
}

}  // namespace

absl::StatusOr<Handshake> Handshake::Create(Role role, const ClusterKey& key, const Token& token,
                                            bool certificates, bool encrypts_unix) {
  Handshake handshake(role, key, token);
  handshake.own_hello_ = std::string(kMagic);
  WireWriter writer(&handshake.own_hello_);
  writer.U16(kVersion);
  writer.U16(static_cast<uint16_t>((key.empty() ? 0 : kHasKey) |
                                   (certificates ? kHasCertificates : 0) |
                                   (encrypts_unix ? kEncryptsUnix : 0)));
  writer.U32(0);
  std::array<uint8_t, kNonceBytes> nonce;
  DG_RETURN_IF_ERROR(FillRandom(nonce.data(), nonce.size()));
  handshake.own_hello_.append(nonce.begin(), nonce.end());
  // The client speaks first: a server says nothing to a client that does not know our magic.
  if (role == Role::kClient) handshake.output_ = handshake.own_hello_;
  return handshake;
}

std::string Handshake::TakeOutput() { return std::exchange(output_, std::string()); }

absl::string_view Handshake::NoPlace() const {
  return role_ == Role::kServer && step_ == Step::kProof ? kNoPlace : absl::string_view();
}

absl::Status Handshake::Receive(absl::string_view bytes) {
  if (bytes.size() > wanted()) return absl::InternalError("more than a handshake wants");
  received_.append(bytes);
  if (step_ == Step::kHello) DG_RETURN_IF_ERROR(CheckMagic());
  if (received_.size() < wanted_) return absl::OkStatus();
  absl::Status taken = step_ == Step::kHello ? TakeHello() : TakeProof();
  received_.clear();
  wanted_ = step_ == Step::kDone ? 0 : kProofBytes;
  return taken;
}

// As soon as there is a byte, so that a client of another protocol is refused at once.
absl::Status Handshake::CheckMagic() const {
  const size_t size = std::min(received_.size(), kMagic.size());
  if (absl::string_view(received_).substr(0, size) == kMagic.substr(0, size)) {
    return absl::OkStatus();
  }
  return absl::UnauthenticatedError("the other end does not speak distgrad's protocol");
}

absl::Status Handshake::TakeHello() {
  other_hello_ = received_;
  step_ = Step::kProof;
  // A server answers whatever the version and flags are: so its client can say what is wrong. The
  // proof covers both hellos, so ends that differ cannot agree.
  if (role_ == Role::kServer) {
    output_ += own_hello_;
    return absl::OkStatus();
  }
  DG_RETURN_IF_ERROR(CheckHello());
  return SendProof();
}

absl::Status Handshake::CheckHello() const {
  if (!has_hello()) return absl::OkStatus();
  WireReader reader(absl::string_view(other_hello_).substr(kMagic.size()));
  const uint16_t version = reader.U16();
  const uint16_t flags = reader.U16();
  if (version != kVersion) {
    return absl::UnauthenticatedError(absl::StrCat("the other end speaks version ", version,
                                                   " of distgrad's protocol, not ", kVersion));
  }
  const bool has_key = (flags & kHasKey) != 0;
  if (has_key == key_.empty()) {
    return absl::UnauthenticatedError(
        absl::StrCat(has_key ? "the other end has a cluster key, this one has none"
                             : "the other end has no cluster key, this one has",
                     " (", kClusterKeySetting, ")"));
  }
  const bool certificates = (flags & kHasCertificates) != 0;
  if (certificates != ((FlagsOf(own_hello_) & kHasCertificates) != 0)) {
    return absl::UnauthenticatedError(
        certificates
            ? absl::StrCat("the other end uses certificates, this one has none (", kCertSetting,
                           ")")
            : absl::StrCat("the other end has no certificates (", kCertSetting, "), this one has"));
  }
  return absl::OkStatus();
}

uint16_t Handshake::FlagsOf(absl::string_view hello) const {
  WireReader reader(hello.substr(kMagic.size() + sizeof(kVersion)));
  return reader.U16();
}

bool Handshake::encrypts_unix() const {
  return ((FlagsOf(own_hello_) | FlagsOf(other_hello_)) & kEncryptsUnix) != 0;
}

absl::Status Handshake::TakeProof() {
  const Role other = role_ == Role::kClient ? Role::kServer : Role::kClient;
  if (role_ == Role::kClient && received_ == kNoPlace) {
    return absl::UnavailableError(
        "the other end had no place for one more client in its handshake, and others waited: too "
        "many try to connect to it at a time, or this process was silent for too long");
  }
  Digest given;
  std::copy(received_.begin(), received_.end(), given.begin());
  DG_ASSIGN_OR_RETURN(Digest expected, Proof(other));
  if (!SameDigest(expected, given) && role_ == Role::kServer && !other_key_.empty()) {
    key_ = other_key_;
    DG_ASSIGN_OR_RETURN(expected, Proof(other));
  }
  if (!SameDigest(expected, given)) return NotOurs(key_.text());
  step_ = Step::kDone;
  return role_ == Role::kServer ? SendProof() : absl::OkStatus();
}

absl::Status Handshake::SendProof() {
  DG_ASSIGN_OR_RETURN(const Digest proof, Proof(role_));
  output_.append(proof.begin(), proof.end());
  return absl::OkStatus();
}

absl::StatusOr<Digest> Handshake::Proof(Role role) const {
  // The roles differ, so that no end's own proof can be sent back to it.
  return Derive(role == Role::kClient ? "client" : "server");
}

absl::StatusOr<Digest> Handshake::Secret() const { return Derive("secret"); }

absl::StatusOr<Digest> Handshake::Derive(absl::string_view purpose) const {
  const bool client = role_ == Role::kClient;
  const std::string token(token_.begin(), token_.end());
  const std::string text = absl::StrCat(purpose, client ? own_hello_ : other_hello_,
                                        client ? other_hello_ : own_hello_, token);
  return Hmac(key_.empty() ? token : key_.text(), text);
}

}  // namespace distgrad
