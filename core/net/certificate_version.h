// One version of a process's certificate files, as OpenSSL keeps it, and the names that the others'
// have to have.
#ifndef DISTGRAD_CORE_NET_CERTIFICATE_VERSION_H_
#define DISTGRAD_CORE_NET_CERTIFICATE_VERSION_H_

#include <openssl/ssl.h>

#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/net/certificate_files.h"
#include "core/net/openssl_objects.h"

namespace distgrad {

// Immutable.
class CertificateVersion {
 public:
  static absl::StatusOr<std::shared_ptr<const CertificateVersion>> Read(
      const CertificateFiles& files);

  // For connections of which both ends show a certificate of an accepted authority. OpenSSL's
  // checks of the chain are complete before CheckName() is asked.
  SSL_CTX* context() const { return context_.get(); }

  // OK if the certificate has the name that it has to have; else names those that it has.
  absl::Status CheckName(const X509* certificate) const;

 private:
  CertificateVersion() = default;

  SslContext context_;
  std::set<std::string> names_;  // any of them will do; as NamesOf() writes them
  std::string wanted_;           // a name as the user wrote it; "": one of names_
};

// Returns a certificate's subjectAltNames: "DNS:host", "IP:10.0.0.1", "URI:spiffe://...".
std::set<std::string> NamesOf(const X509* certificate);

}  // namespace distgrad

#endif  // DISTGRAD_CORE_NET_CERTIFICATE_VERSION_H_
